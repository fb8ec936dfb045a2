"""Two thousand command lines, good, at the edge and bad: each is a namespace or one `UserError`, in milliseconds.

They are made from the parsers' own flags, so a new flag is covered as it appears.
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relax import convert, preprocess, score
from relax.cli import arguments
from relax.cli.command import Parser
from relax.errors import UserError

MODEL = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "intermediate_size": 64,
    "vocab_size": 100,
    "num_experts": 4,
}
NUMBERS = (
    "1", "2", "4", "0", "-1", "7", "64", "1e-3", "0.5", "1e400", "-0.0", "nan", "inf", "1_000", " 3 ", "٣", "0x10", "", "1.",
    "9" * 5_000, "1" + "0" * 400, str(2**31), str(2**63), str(2**64), "1e-400", "3,5", "True", "--", "½",
)  # fmt: skip
PATHS = (
    "hf", "train.jsonl", "new", "new/deeper", "train.jsonl/below", ".", "..", "/", "", " ", "a" * 300, "a" * 5_000,
    "/".join("a" * 3_000), "nul\0byte", "line\nbreak", "half\udcff", "é", "*", "[", "~", "$HOME", "{iteration}", "{", "}{",
    "{iteration}{iteration}", "/dev/null", "/dev/null/x", "/proc/self/mem", "loop", "dangling", "closed", "checkpoints", "-",
)  # fmt: skip
TEXTS = (
    "prompt",
    "name",
    "chosen",
    "x y",
    "",
    "x" * 5_000,
    "a/b",
    ".",
    "..",
    "nul\0",
    "half\udcff",
    "\n",
    "{}",
    "%s",
    "%(prog)s",
    "{0}",
    "名",
)
JSONS = (
    "{}", '{"a": "b"}', '{"from": "role"}', '{"a": 1}', "[]", "null", "1", '"a"', "{", "}", "[" * 100_000, '{"a": ' * 5_000,
    "9" * 5_000, '{"a": NaN}', '{"a": 1e999}', '{"\\ud800": "x"}', '{"enable_thinking": false}', "{'a': 1}", "",
    '{"a": "b", "a": "c"}', '{"chat_template": 1}', '{"tokenize": true}', '{"a": 1' + "0" * 5_000 + "}",
)  # fmt: skip
ENDS = ("help", "explain_loss")  # print and end


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's config, data, checkpoints, links that lead nowhere, and a directory that is closed to others."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name in ("hf", "closed", "checkpoints/iter_0000004"):
        Path(name).mkdir(parents=True)
    Path("hf/config.json").write_text(json.dumps(MODEL))
    Path("train.jsonl").write_text("{}\n")
    Path("data.yaml").write_text(
        "input: train.jsonl\ntokenizer_name_or_path: hf\noutput_prefix: tokens\nhandler_name: PreferencePairHandler\n"
    )
    Path("loop").symlink_to("loop")
    Path("dangling").symlink_to("nothing")
    Path("closed").chmod(0)


def values(action: argparse.Action, generator: random.Random) -> list[str]:
    """Values for a flag: mostly of its kind."""
    if action.nargs == 0:
        return []
    pool: tuple[str, ...] = NUMBERS
    if action.choices:
        pool = (*map(str, action.choices), *map(str, action.choices), "none", "")
    elif action.type is Path or action.metavar in ("DIR", "FILE", "PATH", "[NAME] PATH", "PREFIX"):
        pool = PATHS
    elif action.metavar == "JSON":
        pool = JSONS
    elif action.type is None:
        pool = TEXTS
    if generator.random() < 0.05:
        pool = generator.choice((NUMBERS, PATHS, TEXTS, JSONS))
    if generator.random() < 0.6:  # what each pool begins with is good in most places
        pool = pool[:4]
    many = action.nargs in ("+", "*")
    return [generator.choice(pool) for _ in range(generator.choice((1, 1, 2, 3)) if many else 1)]


def command_lines(parser: Parser, start: list[str], *, count: int, seed: int) -> list[list[str]]:
    """`start` and up to eight flags behind it."""
    generator = random.Random(seed)
    actions = [action for action in parser._actions if action.option_strings and action.dest not in ENDS]
    lines = []
    for _ in range(count):
        line = list(start)
        for action in generator.sample(actions, min(len(actions), generator.choice((1, 1, 2, 2, 3, 5, 8)))):
            flag, given = generator.choice(action.option_strings), values(action, generator)
            joined = len(given) == 1 and generator.random() < 0.5
            line += [f"{flag}={given[0]}"] if joined else [flag, *given]
        if generator.random() < 0.02:
            line.insert(generator.randrange(len(line)), generator.choice(("--", "-", "--lr-dcay", "stray", "-x", "--=", "\0")))
        lines.append(line)
    return lines


COMMANDS: dict[str, tuple[Callable[..., Any], Callable[[], Parser], list[str], int]] = {
    "train": (
        arguments.parse_args,
        arguments.build_parser,
        ["--loss-type", "dpo", "--hf-checkpoint", "hf", "--prompt-data", "train.jsonl", "--num-rollout", "20"],
        1_400,
    ),
    "score": (
        score.parse_args,
        score.build_score_parser,
        ["--hf-checkpoint", "hf", "--prompt-data", "train.jsonl", "--output", "scores.jsonl"],
        200,
    ),
    "convert": (
        convert.parse_args,
        convert.build_convert_parser,
        ["hf-to-mcore", "--hf-checkpoint", "hf", "--save", "new"],
        200,
    ),
    "preprocess": (preprocess.parse_args, preprocess.build_parser, ["--config", "data.yaml"], 200),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_any_command_line_is_understood_or_refused(command: str) -> None:
    parse, build, start, count = COMMANDS[command]
    understood = 0
    for line in command_lines(build(), start, count=count, seed=22):
        began = time.process_time()
        try:
            understood += isinstance(parse(line), argparse.Namespace)
        except UserError as error:
            assert str(error).strip() and len(str(error)) < 20_000, line
        except BaseException as error:
            error.add_note(repr([word[:80] for word in line]))
            raise
        assert time.process_time() - began < 1, line
    assert count / 20 < understood < count  # the lines are neither all wrong nor all right
    assert sorted(path.name for path in Path().iterdir()) == [
        "checkpoints", "closed", "dangling", "data.yaml", "hf", "loop", "train.jsonl",
    ]  # fmt: skip
