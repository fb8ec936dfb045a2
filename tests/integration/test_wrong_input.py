"""Wrong input: one message that says what, where and which flag, exit code 2, at once, and nothing is written or lost."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.integration.command import Workplace, contents, fresh, timeless, write_pairs
from tests.integration.conftest import workplace
from tests.models import CHATML

pytestmark = pytest.mark.integration

Flags = dict[str, Any]


def lines(place: Workplace) -> list[str]:
    return Path(place.flags["prompt_data"]).read_text().splitlines(keepends=True)


def data(place: Workplace, name: str, rows: list[str]) -> Flags:
    place.path(name).write_text("".join(rows))
    return {"prompt_data": name}


def model(place: Workplace, name: str, **config: Any) -> Path:
    """A copy of the model whose config has other values."""
    directory = place.path(name)
    shutil.copytree(place.flags["hf_checkpoint"], directory)
    values = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(values | config))
    return directory


def broken_line(place: Workplace) -> Flags:
    return data(place, "pairs.jsonl", [*lines(place)[:4], '{"chosen": [\n', *lines(place)[5:]])


def all_bad(place: Workplace) -> Flags:
    return data(place, "pairs.jsonl", ['{"prompt": "a", "chosen": "b", "rejected": "b"}\n'] * 3)


def no_rows(place: Workplace) -> Flags:
    data(place, "empty.jsonl", ["\n"])
    return {"eval_prompt_data": ["held", "empty.jsonl"]}


def several_splits(place: Workplace) -> Flags:
    place.path("data").mkdir()
    for split in ("train", "test"):
        data(place, f"data/{split}.jsonl", lines(place))
    return {"prompt_data": "data"}


def not_text(place: Workplace) -> Flags:
    place.path("pairs.jsonl").write_bytes(b'{"chosen": "caf\xe9"}\n')
    return {"prompt_data": "pairs.jsonl"}


def save_under_a_file(place: Workplace) -> Flags:
    place.path("file").write_text("")
    return {"save": "file/run"}


def export_over_other_things(place: Workplace) -> Flags:
    place.path("thesis").mkdir()
    place.path("thesis/chapter.txt").write_text("years of work")
    return {"save_hf": "thesis"}


def greedy_template(place: Workplace) -> Flags:
    (model(place, "model") / "chat_template.jinja").write_text("{{ 'a' * 10000000000 }}")
    return {"hf_checkpoint": "model"}


def no_config(place: Workplace) -> Flags:
    place.path("model").mkdir()
    return {"hf_checkpoint": "model"}


def broken_config(place: Workplace) -> Flags:
    model(place, "model")
    place.path("model/config.json").write_text('{"model_type": ')
    return {"hf_checkpoint": "model"}


def other_family(place: Workplace) -> Flags:
    return {"hf_checkpoint": model(place, "model", model_type="gpt2").name}


def no_weights(place: Workplace) -> Flags:
    (model(place, "model") / "model.safetensors").unlink()
    return {"hf_checkpoint": "model"}


def half_of_the_weights(place: Workplace) -> Flags:
    file = model(place, "model") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    return {"hf_checkpoint": "model"}


def other_shapes(place: Workplace) -> Flags:
    return {"hf_checkpoint": model(place, "model", intermediate_size=96).name}


def small_vocabulary(place: Workplace) -> Flags:
    return {"hf_checkpoint": model(place, "model", vocab_size=257).name}


def not_a_number(place: Workplace) -> Flags:
    file = model(place, "model") / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    return {"hf_checkpoint": "model"}


def no_checkpoints(place: Workplace) -> Flags:
    place.path("thesis").mkdir()
    place.path("thesis/chapter.txt").write_text("years of work")
    return {"load": "thesis"}


TABLE = "train: 0 of 3 rows kept\n  pairs.jsonl: explicit_prompt, 3 rows\n  rejected identical: 3 ("
ADVICE = "give a local directory with config.json, the tokenizer and the weights (`hf download` makes one)"
FAMILIES = "families: llama, mistral, qwen2, qwen3, qwen3_moe"
# Name: (what makes the input and gives the flags, or the flags; how the message starts; what else it says).
CASES: dict[str, tuple[Callable[[Workplace], Flags] | Flags, str, list[str]]] = {
    "missing file": ({"prompt_data": "none.jsonl"}, "--prompt-data none.jsonl does not exist", []),
    "missing eval": ({"eval_prompt_data": "no"}, "--eval-prompt-data no does not exist", []),
    "not text": (not_text, "pairs.jsonl:1: not UTF-8 text.", []),
    "broken line": (broken_line, "pairs.jsonl:5: not valid JSON: ", []),
    "missing keys": (
        lambda place: data(place, "pairs.jsonl", ['{"a": 1, "b": 2}\n']),
        "pairs.jsonl: no row holds a preference pair. Columns found: a, b; needed: chosen and rejected",
        ["--chosen-key", "--rejected-key", "--prompt-key", "--conversation-key-map"],
    ),
    "all rows bad": (all_bad, "No pair is left: 3 of 3 rows were rejected.\n", [TABLE, "pairs.jsonl:1: ", "pairs.jsonl:3: "]),
    "strict": (
        lambda place: data(place, "pairs.jsonl", [*lines(place)[:3], lines(place)[0]]) | {"strict_data": True},
        "pairs.jsonl:4: duplicate: the same as ",
        ["--strict-data"],
    ),
    "trained on": (
        lambda place: {"eval_prompt_data": place.flags["prompt_data"], "strict_data": True},
        "eval: 20 of 20 evaluation pairs are in the training set, too (first: pair 1). Take them out of one set",
        ["--strict-data"],
    ),
    "splits": (several_splits, "data: the directory holds several splits (test: test.jsonl; train: train.jsonl), ", []),
    "empty eval": (no_rows, "empty.jsonl: the file holds no rows.", []),
    "limits": (
        {"preference_max_length": 64},
        "--preference-max-completion-length 64 must be below --preference-max-length 64, which holds the prompt too",
        [],
    ),
    "positions": (
        {"preference_max_length": 1024},
        "--preference-max-length 1024: ",
        ["has positions for 512 tokens; use at most that"],
    ),
    "budget": (
        {"max_tokens_per_gpu": 60, "sft_oversize_strategy": "skip"},
        "No pair is left: 20 of 20 rows were rejected.\n",
        ["rejected oversize: 20 (", "tokens exceed --max-tokens-per-gpu 60"],
    ),
    "beta": ({"dpo_beta": -0.1}, "--dpo-beta must be a finite number above 0, got -0.1", []),
    "flag": ({"lr_dcay_style": "cosine"}, "unknown flag --lr-dcay-style: did you mean --lr-decay-style?", []),
    "steps": ({"num_epoch": 1}, "give --num-rollout (steps) or --num-epoch (passes over the data), not both", []),
    "warmup": (
        {"num_rollout": None, "num_epoch": 1, "lr_warmup_iters": 3},
        "--lr-warmup-iters 3 must be below the run's 3 steps",
        [],
    ),
    "layout": ({"tensor_model_parallel_size": 2}, "--tensor-model-parallel-size 2 x ", ["must divide the world size 1"]),
    "no GPU": ({"device": "cuda"}, "--device cuda: torch sees no CUDA device", ["--device cpu"]),
    "save": (save_under_a_file, "--save file/run cannot be a directory: ", ["/file is a file"]),
    "export": (export_over_other_things, "thesis: exists and is not an export of relax", ["another directory"]),
    "template": (
        greedy_template,
        "A plain question and answer: the chat template in model/chat_template.jinja takes more than 2,147,483,648 bytes",
        [],
    ),
    "no model": ({"hf_checkpoint": "none"}, f"--hf-checkpoint none is not a directory: {ADVICE}", []),
    "no config": (no_config, f"--hf-checkpoint model has no config.json: {ADVICE}", []),
    "broken config": (broken_config, "--hf-checkpoint: cannot read model/config.json: ", ["line 1 column 16"]),
    "family": (other_family, f"model/config.json: model_type 'gpt2' is not supported; {FAMILIES}", []),
    "no weights": (no_weights, "model: no model.safetensors and no model.safetensors.index.json there", []),
    "cut weights": (half_of_the_weights, "model/model.safetensors: unreadable or cut short (", ["copy the checkpoint again"]),
    "shapes": (
        other_shapes,
        "model: the weights do not fit its config.json; wrong shape: ",
        ["model.layers.0.mlp.gate_proj.weight [80, 48] (the config says [96, 48])", "and 3 more"],
    ),
    "vocabulary": (
        small_vocabulary,
        "--hf-checkpoint model: the data hold token id 258, but the model has a vocabulary of 257; ",
        [],
    ),
    "NaN weights": (not_a_number, "model: model.norm.weight holds values that are NaN or infinite; the file is damaged", []),
    "no checkpoints": (no_checkpoints, "--load thesis is not a directory of checkpoints (iter_*): it holds chapter.txt", []),
}


@pytest.mark.parametrize("case", CASES)
def test_wrong_input_is_told_once_and_changes_nothing(fresh_place: Workplace, case: str) -> None:
    make, start, parts = CASES[case]
    flags = make(fresh_place) if callable(make) else make
    before = contents(fresh_place.directory)
    ended = fresh_place.run(**({"save": "out/run", "save_interval": 1} | flags))
    message = ended.error
    assert message.startswith(start) and all(part in message for part in parts), message
    assert ended.cpu < 5
    after = contents(fresh_place.directory)
    assert {name: after[name] for name in before} == before
    assert not [name for name in after.keys() - before.keys() if not name.startswith(".cache/")]


def test_a_wrong_flag_is_told_at_once(fresh_place: Workplace) -> None:
    ended = fresh(fresh_place.arguments(prompt_data="none.jsonl"), directory=fresh_place.directory)
    assert ended.error == "--prompt-data none.jsonl does not exist" and ended.cpu < 10


def test_divergence_stops_the_run_and_spoils_no_checkpoint(fresh_place: Workplace) -> None:
    message = fresh_place.refuse(lr=1e30, lr_decay_style="constant", save="out/run", save_interval=1)
    assert message.startswith("step 2: the loss is nan and the gradient norm nan; no checkpoint holds this step")
    assert "--lr 1e+30: try a lower one" in message
    assert [line["train/step"] for line in fresh_place.log("run")] == [1]
    assert not fresh_place.path("out/run/iter_0000002").exists()


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
def test_a_full_disk_leaves_the_former_checkpoint_whole(fresh_place: Workplace, background: bool) -> None:
    place, flags = fresh_place, {"lr_decay_style": "constant", "save": "out/run", "load": "out/run", "async_save": background}
    place.succeed(exp_name="whole", lr_decay_style="constant", save_hf="out/whole", num_rollout=4)
    place.succeed(num_rollout=2, **flags)
    saved = contents(place.path("out/run"))
    message = place.refuse(num_rollout=4, save_interval=1, file_limit=600_000, **flags)
    assert message.startswith("--save out/run: iter_0000003 cannot be saved: File too large")
    assert "the former checkpoint, iter_0000002, is whole. Make room" in message
    assert contents(place.path("out/run")) == saved
    place.succeed(num_rollout=4, save_hf="out/resumed", **flags)
    assert timeless(place.log("run")) == timeless(place.log("whole"))
    whole, resumed = (place.path(f"out/{name}/model.safetensors").read_bytes() for name in ("whole", "resumed"))
    assert whole == resumed


def test_a_full_disk_keeps_the_former_export_and_names_what_it_stops(fresh_place: Workplace) -> None:
    place = fresh_place
    place.succeed(exp_name="run", save_hf="out/hf", num_rollout=1)
    exported = contents(place.path("out"))
    message = place.refuse(exp_name="run", save_hf="out/hf", num_rollout=2, file_limit=200_000)
    assert message.startswith("out/hf: the export cannot be written (") and "File too large" in message
    assert contents(place.path("out")) == exported
    message = place.refuse(exp_name="run", file_limit=2_500)
    assert message.startswith("cannot write the metrics of step 3 to log/run.jsonl: ") and "File too large" in message
    write_pairs(place.path("many.jsonl"), 300)
    place.succeed(prompt_data="many.jsonl", dry_run=True)
    message = place.refuse(exp_name="run", prompt_data="many.jsonl", file_limit=5_000)
    assert message.startswith(
        "--data-cache-dir .cache/relax: the reference table cannot be written: File too large. Free space"
    )
    place.path("log/other/data_report.json").mkdir(parents=True)
    message = place.refuse(exp_name="other")
    assert message == "--log-dir log: data_report.json cannot be written: Is a directory"
    message = place.refuse(exp_name="run", data_cache_dir="cache", file_limit=2_500)
    assert "the tokenized data cannot be written: File too large" in message and "--data-cache-dir" in message
    assert not [path for path in place.path("cache").iterdir()]


CODE = "import pathlib\npathlib.Path({marker!r}).touch()\nclass Anything:\n    pass\n"


class Touch:
    """Unpickles into a call that leaves a mark."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


def test_code_from_a_model_directory_never_runs(fresh_place: Workplace) -> None:
    """Named by config and tokenizer, or lying there: the stock classes serve where they can, else it is an error."""
    place, marker = fresh_place, fresh_place.path("ran")
    code = {"AutoConfig": "code.Anything", "AutoModelForCausalLM": "code.Anything"}
    directory = model(place, "known", auto_map=code)
    tokenizer = json.loads((directory / "tokenizer_config.json").read_text())
    tokenizer |= {"auto_map": {"AutoTokenizer": ["code.Anything", "code.Anything"]}, "tokenizer_class": "Anything"}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    unknown = model(place, "unknown", auto_map=code, model_type="something_new")
    for made in (directory, unknown):
        for name in ("code", "modeling_qwen3", "conftest", "sitecustomize"):
            (made / f"{name}.py").write_text(CODE.format(marker=str(marker)))
    place.succeed(hf_checkpoint=directory, num_rollout=1, save_hf="out/hf")
    assert not list(place.path("out/hf").glob("*.py"))
    message = place.refuse(hf_checkpoint=unknown)
    assert message == f"{unknown}/config.json: model_type 'something_new' is not supported; {FAMILIES}"
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(Touch(marker)))
    assert "only pickled weights (.bin), which can run code and are never read" in place.refuse(hf_checkpoint=directory)
    template = CHATML.replace("{% for", "{{ cycler.__init__.__globals__.os.system('touch ran') }}{% for", 1)
    (model(place, "template") / "chat_template.jinja").write_text(template)
    assert "chat template" in place.refuse(hf_checkpoint="template")
    assert not marker.exists()


@pytest.mark.parametrize("name", ["common.pt", ".metadata"])
def test_code_from_a_checkpoint_never_runs(server: Any, assets: Path, tmp_path: Path, name: str) -> None:
    place, marker = workplace(server, assets, tmp_path), tmp_path / "ran"
    place.succeed(save="out/run", num_rollout=1)
    with place.path(f"out/run/iter_0000001/{name}").open("wb") as file:
        torch.save(Touch(marker), file) if name == "common.pt" else pickle.dump(Touch(marker), file)
    changed = place.refuse(load="out/run")
    assert f"out/run/iter_0000001 is damaged: its {name} does not hold what was saved" in changed
    place.path("out/run/iter_0000001/checksums.json").unlink()  # as a forger would
    message = place.refuse(load="out/run")
    assert f"out/run/iter_0000001/{name} asks for " in message and "relax refuses to read it" in message
    assert not marker.exists()
