"""`relax.cli.places` in the commands besides training, and what stands already where an export goes."""

import json
from pathlib import Path

import pytest

from relax import convert, preprocess, score
from relax.cli.places import step_paths
from relax.errors import UserError


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A current directory with a model, a checkpoint, data, and a link to the model."""
    monkeypatch.chdir(tmp_path)
    for name in ("hf", "megatron/iter_0000020", "data"):
        Path(name).mkdir(parents=True)
    Path("hf/config.json").write_text(json.dumps({"num_attention_heads": 4, "num_hidden_layers": 2}))
    Path("data/a.jsonl").write_text("{}\n")
    Path("link").symlink_to("hf")


REFUSED = {
    "convert hf-to-mcore --hf-checkpoint hf --save hf/mcore": "--save hf/mcore lies in --hf-checkpoint hf",
    "convert hf-to-mcore --hf-checkpoint hf --save link/mcore": "--save link/mcore lies in --hf-checkpoint hf",
    "convert mcore-to-hf --hf-checkpoint hf --load megatron --save megatron/hf": "--save megatron/hf lies in --load megatron",
    "score --hf-checkpoint hf --prompt-data data --output data/scores.jsonl": "--output data/scores.jsonl lies in "
    "--prompt-data data",
    "score --hf-checkpoint hf --prompt-data data --output link/scores.jsonl": "--output link/scores.jsonl lies in "
    "--hf-checkpoint hf",
    "score --hf-checkpoint hf --load megatron --prompt-data data --output megatron/s": "--output megatron/s lies in "
    "--load megatron",
    "score --hf-checkpoint hf --prompt-data data --output s --data-cache-dir data/cache": "--data-cache-dir data/cache lies "
    "in --prompt-data data",
    "preprocess --handler-name PreferencePairHandler --input data --tokenizer-name-or-path hf --output-prefix data/tokens": (
        "output_prefix data/tokens_packed_ lies in input data"
    ),
    "preprocess --handler-name PreferencePairHandler --input data --tokenizer-name-or-path hf --output-prefix hf/tokens": (
        "output_prefix hf/tokens_packed_ lies in tokenizer_name_or_path hf"
    ),
}


@pytest.mark.parametrize("command", REFUSED)
def test_no_output_lies_in_an_input(command: str) -> None:
    name, *argv = command.split()
    parse = {"convert": convert.parse_args, "score": score.parse_args, "preprocess": preprocess.parse_args}[name]
    with pytest.raises(UserError) as caught:
        parse(argv)
    assert str(caught.value).startswith(f"{REFUSED[command]}, where the two would ")
    assert not Path("data/cache").exists()


def test_preprocessing_writes_beside_a_directory_of_its_name() -> None:
    argv = "--handler-name PreferencePairHandler --input data --tokenizer-name-or-path hf --output-prefix data"
    assert preprocess.parse_args(argv.split()).output_prefix == "data"


def test_step_paths_are_those_that_some_step_leads_to(tmp_path: Path) -> None:
    for name in ("out/5/hf", "out/12/hf", "out/x/hf", "out/7", "flat-3"):
        Path(name).mkdir(parents=True)
    Path("flat-4").symlink_to("nowhere")

    def found(path: str) -> list[str]:
        return [str(path) for path in step_paths(path)]

    assert found("out/{iteration}/hf") == ["out/12/hf", "out/5/hf"]
    assert found(str(tmp_path / "out/{iteration}")) == [str(tmp_path / "out" / step) for step in ("12", "5", "7")]
    assert found("flat-{iteration}") == ["flat-3", "flat-4"]
    assert found("hf") == ["hf"] and found("absent/{iteration}") == found("absent") == []
