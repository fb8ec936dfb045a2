"""`relax.preprocess`: a configuration's keys and the flags that win over them, and one message for what is wrong."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from relax.errors import UserError
from relax.preprocess import TEMPLATES, Progress, parse_args

CONFIGS = sorted((Path(__file__).parents[3] / "configs" / "datasets").glob("*.yaml"))


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A complete configuration."""
    (tmp_path / "tokenizer").mkdir()
    return write(tmp_path / "c.yaml")


def write(path: Path, **changes: Any) -> Path:
    keys = {
        "input": "rows.jsonl",
        "output_prefix": "out/rows",
        "handler_name": "AlpacaStylePairwiseHandler",
        "tokenizer_name_or_path": str(path.parent / "tokenizer"),
    }
    path.write_text(yaml.safe_dump({**keys, **changes}))
    return path


def test_keys_are_flags_and_flags_win(config: Path):
    args = parse_args(["--config", str(config)])
    assert (args.input, args.workers, args.log_interval, args.seq_length) == (["rows.jsonl"], 1, 1000, None)
    assert (args.prompt_type, args.prompt_type_path, args.enable_thinking, args.map_keys) == ("auto", TEMPLATES, None, {})
    write(
        config,
        input=["a.jsonl", "b.jsonl"],
        map_keys={"prompt": "question", "query": ""},
        seq_length=4096,
        enable_thinking=True,
        prompt_type="qwen3",
        workers=4,
        prompt_type_path=None,
    )
    args = parse_args(["--config", str(config), "--seq-length", "512", "--input", "c.jsonl", "d.jsonl", "--workers=2"])
    assert (args.input, args.seq_length, args.workers) == (["c.jsonl", "d.jsonl"], 512, 2)
    assert (args.map_keys, args.enable_thinking) == ({"prompt": "question", "query": ""}, True)
    assert (args.prompt_type, args.prompt_type_path) == ("qwen3", TEMPLATES)
    args = parse_args(["--config", str(config), "--enable-thinking", "none", "--map-keys", "{}"])
    assert args.enable_thinking is None and args.map_keys == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"seq_len": 5},
            "unknown key 'seq_len'; there are: input, handler_name, map_keys, seq_length, ",
        ),
        ({"seq_length": "long"}, "--seq-length: must be a whole number, at least 2, not 'long'"),
        ({"workers": 0}, "--workers: must be a whole number, at least 1, not 0"),
        ({"map_keys": {"prompt": 3}}, "--map-keys: must map strings to strings, but 'prompt' maps to 3"),
        ({"tokenizer_type": "Llama2Tokenizer"}, "--tokenizer-type: invalid choice: 'Llama2Tokenizer'"),
        ({"enable_thinking": "maybe"}, "--enable-thinking: invalid choice: 'maybe'"),
    ],
)
def test_what_is_wrong_in_a_configuration_names_it(config: Path, changes: dict[str, Any], message: str):
    write(config, **changes)
    with pytest.raises(UserError) as error:
        parse_args(["--config", str(config)])
    assert str(error.value).startswith(f"--config {config}: {message}")


def test_what_is_missing(config: Path, tmp_path: Path):
    write(config, input=None, handler_name=None)
    with pytest.raises(UserError, match=r"c\.yaml: input, handler_name must be given"):
        parse_args(["--config", str(config)])
    with pytest.raises(UserError, match="without --config: input, tokenizer_name_or_path, output_prefix, handler_name must"):
        parse_args([])
    write(config, tokenizer_name_or_path="gone")
    with pytest.raises(UserError, match="tokenizer_name_or_path gone: no such directory"):
        parse_args(["--config", str(config)])
    with pytest.raises(UserError, match=r"--config .*none\.yaml: cannot be read: .*No such file"):
        parse_args(["--config", str(tmp_path / "none.yaml")])
    for text, message in (("- a", "must hold keys and values"), ("a: [", "cannot be read: while parsing")):
        config.write_text(text)
        with pytest.raises(UserError, match=message):
            parse_args(["--config", str(config)])
    with pytest.raises(UserError, match="unknown flag --output_prefix: did you mean --output-prefix"):
        parse_args(["--output_prefix", "x"])


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_shipped_configurations_parse(path: Path, tmp_path: Path):
    args = parse_args(["--config", str(path), "--tokenizer-name-or-path", str(tmp_path)])
    assert args.output_prefix.startswith("data/") and args.log_interval == 1000


def test_progress_each_interval(capsys: pytest.CaptureFixture[str]):
    progress = Progress(1000)
    for done in (256, 999, 1024, 1300, 1999, 4096, 4100):
        progress(done, 4100)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" rows, ")[0] for line in lines] == ["1,024 of 4,100", "4,096 of 4,100"]
