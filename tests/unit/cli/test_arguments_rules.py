"""`relax.cli.validation` and `relax.cli.layout_rules`: each rule across flags, files and the model, with its message."""

import json
import os
import re
from argparse import Namespace
from pathlib import Path

import pytest

from relax.cli import validation
from relax.cli.arguments import build_parser, parse_args
from relax.cli.layout_rules import validate_layout
from relax.errors import UserError

DENSE = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 8,
    "intermediate_size": 64,
    "vocab_size": 101,
}
MOE = {**DENSE, "num_experts": 8, "moe_intermediate_size": 24}
START = ["--loss-type", "dpo", "--hf-checkpoint", "hf"]
BASE = [*START, "--prompt-data", "train.jsonl", "--num-rollout", "100"]


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    """A current directory with an HF directory, data files and a Megatron checkpoint at steps 20 and 50."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name in ("hf", "other_hf", "megatron/iter_0000020", "megatron/iter_0000050", "empty"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("hf", "other_hf"):
        (tmp_path / name / "config.json").write_text(json.dumps(DENSE))
    for name in ("train", "eval"):
        (tmp_path / f"{name}.jsonl").write_text("{}\n")


def refused(argv: list[str]) -> str:
    with pytest.raises(UserError) as caught:
        parse_args(argv)
    return str(caught.value)


NOT_ENOUGH = {
    "--hf-checkpoint hf": "--loss-type is required; see --help",
    "--loss-type dpo": "--hf-checkpoint is required; see --help",
    "--loss-type dpo --hf-checkpoint hf --num-rollout 1": "--prompt-data is required, or --skip-train to evaluate only",
    "--loss-type dpo --hf-checkpoint hf --prompt-data train.jsonl": "give --num-rollout (steps) or --num-epoch (passes "
    "over the data), or --skip-train to evaluate only",
    "--loss-type dpo --hf-checkpoint hf --skip-train": "--skip-train needs --eval-prompt-data: there is nothing to "
    "evaluate otherwise",
}


@pytest.mark.parametrize("argv", NOT_ENOUGH)
def test_what_a_run_cannot_do_without(argv):
    assert refused(argv.split()) == NOT_ENOUGH[argv]


CONTRADICTIONS = {
    "--num-epoch 2": "give --num-rollout (steps) or --num-epoch (passes over the data), not both",
    "--preference-max-length 64 --preference-max-completion-length 64": "--preference-max-completion-length 64 must be "
    "below --preference-max-length 64, which holds the prompt too",
    "--lr-warmup-iters 5 --lr-warmup-fraction 0.1": "give --lr-warmup-iters or --lr-warmup-fraction, not both",
    "--lr-warmup-iters 100": "--lr-warmup-iters 100 must be below --num-rollout 100: the peak --lr would not be reached",
    "--lr-decay-style constant --min-lr 1e-7": "--min-lr has no effect with --lr-decay-style constant",
    "--lr 1e-6 --min-lr 1e-5": "--min-lr 1e-05 must not be above --lr 1e-06",
    "--profile --profile-step-start 4 --profile-step-end 4": "--profile-step-start 4 must be below --profile-step-end 4",
    "--profile --profile-step-start 101": "--profile-step-start 101 is after the last step, --num-rollout 100",
    "--recompute-granularity full": "--recompute-granularity full needs --recompute-method and --recompute-num-layers, "
    "for example --recompute-method uniform --recompute-num-layers 1",
    "--recompute-granularity selective --recompute-method block": "--recompute-method has no effect with "
    "--recompute-granularity selective",
    "--exp-name a/b": "--exp-name 'a/b' must be a plain name: it becomes a file name in --log-dir",
    "--exp-name ..": "--exp-name '..' must be a plain name: it becomes a file name in --log-dir",
}


@pytest.mark.parametrize("extra", CONTRADICTIONS)
def test_contradictions(extra):
    assert refused([*BASE, *extra.split()]) == CONTRADICTIONS[extra]


VALUES = {
    **dict.fromkeys(("--ref-ckpt-step", "--ckpt-step", "--save-interval", "--keep-checkpoints", "--eval-interval"), "5"),
    **dict.fromkeys(("--world-size", "--recompute-num-layers", "--profile-step-start", "--profile-step-end"), "5"),
    **dict.fromkeys(("--wandb-project", "--wandb-name"), "x"),
    "--wandb-mode": "offline",
    "--recompute-method": "uniform",
}


@pytest.mark.parametrize(("flag", "needed", "why"), validation.NEEDS)
def test_a_flag_without_effect_is_refused(flag, needed, why):
    given = [flag, VALUES[flag]] if flag in VALUES else [flag]
    assert refused([*BASE, *given]) == f"{flag} needs {needed}: {why}"


WRONG_FILES = {
    "--hf-checkpoint nowhere": "--hf-checkpoint nowhere is not a directory: give a local directory with config.json, "
    "the tokenizer and the weights (`hf download` makes one)",
    "--hf-checkpoint empty": "--hf-checkpoint empty has no config.json: give a local directory with config.json, the "
    "tokenizer and the weights (`hf download` makes one)",
    "--prompt-data train.jsonl gone.jsonl": "--prompt-data gone.jsonl does not exist",
    "--eval-prompt-data held gone.jsonl": "--eval-prompt-data gone.jsonl does not exist",
    "--ref-load gone": "--ref-load gone is not a directory",
    "--ref-load empty": "--ref-load empty is neither an HF directory (config.json) nor a Megatron checkpoint (iter_*)",
    "--ref-load other_hf --ref-ckpt-step 5": "--ref-ckpt-step 5 picks a Megatron iteration, but --ref-load other_hf is "
    "an HF directory",
    "--ref-load megatron --ref-ckpt-step 5": "--ref-ckpt-step 5: megatron holds iterations [20, 50]",
    "--load megatron --ckpt-step 30": "--ckpt-step 30: megatron holds iterations [20, 50]",
    "--load gone --ckpt-step 30": "--ckpt-step 30: gone holds no iteration",
    "--load train.jsonl": "--load train.jsonl is not a directory",
    "--load empty --finetune": "--finetune: --load empty holds no Megatron checkpoint",
    "--load megatron --finetune --save ./megatron": "--finetune starts a new run, so --save must be another directory "
    "than --load",
    "--save-hf out/{step}": "--save-hf out/{step}: {iteration} is the only placeholder",
    "--save train.jsonl": "--save train.jsonl cannot be a directory: it is a file",
    "--log-dir train.jsonl/log": "--log-dir train.jsonl/log cannot be a directory: {here}/train.jsonl is a file",
}


# Flags, and what the message says before the reason: the output, how it lies, the other place.
SHARED = {
    "--save-hf ./hf": "--save-hf ./hf is the place of --hf-checkpoint hf",
    "--save-hf other_hf --ref-load other_hf": "--save-hf other_hf is the place of --ref-load other_hf",
    "--save m/ck --save-hf m": "--save-hf m contains --save m/ck",
    "--save m --save-hf m/hf": "--save-hf m/hf lies in --save m",
    "--save m --load m/hf/": "--save m contains --load m/hf",
    "--save megatron/new --load megatron": "--save megatron/new lies in --load megatron",
    "--save link/new --load megatron": "--save link/new lies in --load megatron",
    "--save hf/ck": "--save hf/ck lies in --hf-checkpoint hf",
    "--save-hf .": "--save-hf . contains --hf-checkpoint hf",
    "--save-hf hf/..": "--save-hf hf/.. contains --hf-checkpoint hf",
    "--save data/ck --prompt-data data": "--save data/ck lies in --prompt-data data",
    "--save-hf data --prompt-data data/a.jsonl": "--save-hf data contains --prompt-data data/a.jsonl",
    "--log-dir data/log --eval-prompt-data held data": "--log-dir data/log lies in --eval-prompt-data data",
    "--save-hf log/hf": "--log-dir log contains --save-hf log/hf",
    "--save .cache/relax/ck": "--data-cache-dir .cache/relax contains --save .cache/relax/ck",
    "--data-cache-dir log": "--data-cache-dir log is the place of --log-dir log",
    "--tensorboard-dir m/board --save m": "--tensorboard-dir m/board lies in --save m",
    "--tensorboard-dir . --save m": "--tensorboard-dir . contains --hf-checkpoint hf",
    "--save m/20 --save-hf m/{iteration}": "--save-hf m/{iteration} is the place of --save m/20",
    "--save m/run-20/ck --save-hf m/run-{iteration}": "--save-hf m/run-{iteration} contains --save m/run-20/ck",
    "--save m --save-hf m/{iteration}/hf": "--save-hf m/{iteration}/hf lies in --save m",
}


@pytest.mark.parametrize("extra", SHARED)
def test_every_output_is_a_place_of_its_own(extra, tmp_path):
    for name in ("data", "m/hf"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "data" / "a.jsonl").write_text("{}\n")
    (tmp_path / "link").symlink_to("megatron")
    before = sorted(tmp_path.rglob("*"))
    flag = SHARED[extra].split()[0]
    reason = f", where the two would overwrite or read each other's files; give {flag} a directory of its own"
    assert refused([*BASE, *extra.split()]) == SHARED[extra] + reason
    assert sorted(tmp_path.rglob("*")) == before


APART = [
    "--save out/run --load ./out/run --save-hf out/run-hf --log-dir out/log --data-cache-dir out/cache",
    "--save out/two --save-hf out/{iteration}",
    "--save out/run --save-hf out/run-{iteration}",
    "--tensorboard-dir log/board",
    "--tensorboard-dir log",
    "--load megatron --skip-train --save megatron --eval-prompt-data eval.jsonl",
]


@pytest.mark.parametrize("extra", APART)
def test_places_side_by_side_are_fine(extra):
    parse_args([*BASE, *extra.split()])


@pytest.mark.parametrize("extra", WRONG_FILES)
def test_files_and_directories(extra, tmp_path):
    assert refused([*BASE, *extra.split()]) == WRONG_FILES[extra].replace("{here}", str(tmp_path))


def test_good_files_and_directories(tmp_path):
    extra = "--prompt-data eval.jsonl train.jsonl --ref-load megatron --ref-ckpt-step 20 --load absent --save absent"
    args = parse_args([*BASE, *extra.split(), "--save-hf", "out/{iteration}/hf"])
    assert (args.ref_load, args.load, args.save) == (Path("megatron"), Path("absent"), Path("absent"))
    assert parse_args([*BASE, "--load", "megatron", "--ckpt-step", "50", "--finetune"]).ckpt_step == 50
    assert sorted(os.listdir(tmp_path)) == sorted(
        [
            "hf",
            "other_hf",
            "megatron",
            "empty",
            "train.jsonl",
            "eval.jsonl",
        ]
    ), "checking makes no directory"


def test_permissions(monkeypatch, tmp_path):
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and access(path, mode))
    expected = f"--log-dir log is not writable: no permission to write in {tmp_path}"
    assert refused(BASE) == expected
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.R_OK and access(path, mode))
    assert refused(BASE) == "--prompt-data train.jsonl is not readable"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot read .*: Expecting"),
        ("[]", "must hold a JSON object, not list$"),
        ("[" * 200_000, "cannot read .*: maximum recursion"),
    ],
)
def test_a_broken_config(text, message):
    Path("hf/config.json").write_text(text)
    assert re.match(f"--hf-checkpoint: (hf/config.json )?{message}", refused(BASE))


def layout(extra: str, world_size: int, model: dict[str, object]) -> None:
    args = build_parser().parse([*BASE, *extra.split()])
    if args.expert_tensor_parallel_size is None:
        args.expert_tensor_parallel_size = args.tensor_model_parallel_size
    validate_layout(args, world_size, model)


TP, PP, CP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"
EP, ETP = "--expert-model-parallel-size", "--expert-tensor-parallel-size"
CHUNK = "--num-layers-per-virtual-pipeline-stage"
NO_EXPERTS = "needs a mixture-of-experts model, and config.json names no experts: drop the flag"
LAYOUTS = [
    (f"{TP} 2 {PP} 2", 6, DENSE, f"{TP} 2 x {PP} 2 x {CP} 1 = 4 must divide the world size 6: start a multiple of 4 "
     "ranks or change the sizes"),
    (f"{EP} 4", 6, MOE, f"{ETP} 1 x {EP} 4 x {PP} 1 = 4 must divide the world size 6: start a multiple of 4 ranks or "
     "change the sizes"),
    ("--sequence-parallel", 1, DENSE, f"--sequence-parallel splits over tensor-parallel ranks: it needs {TP} above 1"),
    (f"{CHUNK} 2", 1, DENSE, f"{CHUNK} interleaves pipeline stages: it needs {PP} above 1"),
    (f"{TP} 3", 3, DENSE, f"{TP} 3 must divide the model's num_attention_heads (4)"),
    (f"{TP} 4", 4, DENSE, f"{TP} 4 must divide the model's num_key_value_heads (2)"),
    (f"{TP} 2", 2, {**DENSE, "intermediate_size": 63}, f"{TP} 2 must divide the model's intermediate_size (63)"),
    (f"{PP} 3", 3, DENSE, f"{PP} 3 must divide the model's num_hidden_layers (8)"),
    (f"{TP} 2", 2, {**DENSE, "vocab_size": 1}, f"{TP} 2 must not exceed the model's vocab_size (1): a rank would hold "
     "no token"),
    (f"{PP} 2 {CHUNK} 3", 2, DENSE, f"{CHUNK} 3 must divide the 4 layers of a pipeline stage (num_hidden_layers 8 / "
     f"{PP} 2) and be smaller, so that each rank gets several chunks"),
    (f"{PP} 2 {CHUNK} 4", 2, DENSE, f"{CHUNK} 4 must divide the 4 layers of a pipeline stage (num_hidden_layers 8 / "
     f"{PP} 2) and be smaller, so that each rank gets several chunks"),
    (f"{EP} 2", 2, DENSE, f"{EP} {NO_EXPERTS}"),
    (f"{TP} 2 {ETP} 1", 2, DENSE, f"{ETP} {NO_EXPERTS}"),
    ("--moe-aux-loss-coeff 0.01", 1, DENSE, f"--moe-aux-loss-coeff {NO_EXPERTS}"),
    (f"{EP} 3", 3, MOE, f"{EP} 3 must divide the model's number of experts (8)"),
    (f"{EP} 2 {ETP} 5", 10, MOE, f"{ETP} 5 must divide the model's moe_intermediate_size (24)"),
    (f"{TP} 2", 2, MOE, f"a mixture-of-experts model with {TP} 2 needs --sequence-parallel"),
    ("", 1, {**DENSE, "num_hidden_layers": "8"}, "--hf-checkpoint: config.json must give num_hidden_layers as a whole "
     "number, at least 1, not '8'"),
    ("", 1, {"num_attention_heads": 4}, "--hf-checkpoint: config.json must give num_hidden_layers as a whole number, "
     "at least 1, not None"),
]  # fmt: skip


@pytest.mark.parametrize(("extra", "world_size", "model", "message"), LAYOUTS)
def test_layouts_that_cannot_work(extra, world_size, model, message):
    with pytest.raises(UserError) as caught:
        layout(extra, world_size, model)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("extra", "world_size", "model"),
    [
        ("", 1, DENSE),
        ("", 3, DENSE),
        (f"{TP} 2 {PP} 2 {CP} 2 --sequence-parallel", 8, DENSE),
        (f"{TP} 2", 2, {**DENSE, "vocab_size": 101}),  # padded
        (f"{TP} 4", 4, {key: value for key, value in DENSE.items() if key != "num_key_value_heads"}),
        (f"{PP} 2 {CHUNK} 2", 2, DENSE),
        (f"{EP} 2", 2, MOE),
        (f"{TP} 2 {EP} 2 {ETP} 1 --sequence-parallel", 4, MOE),
        (f"{TP} 2 {ETP} 1 --sequence-parallel", 2, MOE),
        (f"{TP} 2 --sequence-parallel --moe-aux-loss-coeff 0.001", 2, MOE),
        (f"{TP} 2 --sequence-parallel", 2, {**MOE, "intermediate_size": 63}),  # it has no such layer
        (f"{EP} 4", 4, {**DENSE, "num_local_experts": 4}),
    ],
)
def test_layouts_that_work(extra, world_size, model):
    layout(extra, world_size, model)


def test_parsing_checks_the_layout_of_the_plan_or_the_process(monkeypatch):
    assert refused([*BASE, TP, "2"]).endswith(
        "= 2 must divide the world size 1: start a multiple of 2 ranks or change the sizes"
    )
    assert isinstance(parse_args([*BASE, TP, "2", "--dry-run", "--world-size", "2"]), Namespace)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert isinstance(parse_args([*BASE, TP, "2"]), Namespace)
