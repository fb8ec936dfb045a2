"""`relax.cli.arguments`: defaults, value types, loss flags, help and unknown flags (rules across flags: the other file)."""

import dataclasses
import json
import math
import re
import sys
from pathlib import Path
from typing import Literal

import pytest

from relax.cli import arguments
from relax.cli import objective_flags as loss_flags
from relax.cli.arguments import build_parser, parse_args
from relax.cli.objective_flags import build_objective
from relax.errors import UserError
from relax.objectives import DPO, Objective, RewardModel

MODEL = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "intermediate_size": 64,
    "vocab_size": 100,
}
BASE = ["--hf-checkpoint", "hf", "--prompt-data", "train.jsonl", "--num-rollout", "200"]


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    """A current directory with a model's config and data files, outside any torchrun."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(MODEL))
    for name in ("train", "more", "eval", "harmless"):
        (tmp_path / f"{name}.jsonl").write_text("{}\n")


def parse(*extra: str, loss: str = "dpo"):
    return parse_args(["--loss-type", loss, *BASE, *extra])


def test_defaults_of_the_contract():
    args = parse()
    contract = {
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_eps": 1e-8,
        "weight_decay": 0.0,
        "clip_grad": 1.0,
        "lr": 5e-7,
        "min_lr": 0.0,
        "lr_decay_style": "cosine",
        "lr_warmup_iters": 0,
        "lr_warmup_fraction": None,
        "global_batch_size": 32,
        "max_tokens_per_gpu": 8192,
        "preference_max_length": 1024,
        "preference_max_completion_length": 512,
        "sft_oversize_strategy": "keep",
        "seed": 42,
        "bf16": True,
        "use_distributed_optimizer": False,
        "moe_aux_loss_coeff": 0.0,
        "dpo_beta": 0.1,
        "dpo_reference_free": False,
        "task_type": "causal_lm",
        "log_interval": 1,
        "log_dir": Path("log"),
        "shuffle": True,
        "share_prompt": True,
        "save_optim": True,
        "load_rng": True,
        "ref_load": Path("hf"),
        "world_size": 1,
        "expert_tensor_parallel_size": 1,
        "wandb_project": "relax",
        "profile_step_start": 10,
        "profile_step_end": 12,
        "prompt_data": ["train.jsonl"],
        "eval_prompt_data": {},
    }
    assert {key: getattr(args, key) for key in contract} == contract


def test_defaults_depend_on_the_loss_and_on_other_flags():
    assert parse(loss="rm").lr == 1e-5
    assert parse("--lr", "3e-6", loss="rm").lr == 3e-6
    assert parse("--save", "runs/first").exp_name == "first"
    assert parse("--save", "runs/first").wandb_name == "first"
    assert parse("--save", "runs/first", "--exp-name", "x").exp_name == "x"
    assert re.fullmatch(r"rm-\d{8}-\d{6}", parse(loss="rm").exp_name)
    assert parse("--skip-train", "--eval-prompt-data", "eval.jsonl", "--save", "runs/first").exp_name == "first-eval"
    assert parse("--profile", "--profile-step-start", "3").profile_step_end == 5


def test_a_world_size_without_a_rank_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="^the environment has WORLD_SIZE 2 without a RANK: start the ranks by torchrun"):
        parse()
    parse("--dry-run")


def test_world_size_comes_from_the_environment_or_the_plan(monkeypatch):
    assert parse("--dry-run", "--world-size", "16").world_size == 16
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    args = parse("--tensor-model-parallel-size", "2", "--sequence-parallel")
    assert (args.world_size, args.expert_tensor_parallel_size) == (4, 2)
    monkeypatch.setenv("WORLD_SIZE", "many")
    message = "^the environment's WORLD_SIZE must be a whole number, at least 1, not 'many'$"
    with pytest.raises(UserError, match=message):
        parse()


def test_data_flags():
    args = parse(
        *("--prompt-data", "train.jsonl", "more.jsonl", "--eval-prompt-data", "eval.jsonl"),
        *("--eval-prompt-data", "harmless", "harmless.jsonl", "--no-shuffle", "--no-share-prompt"),
        *("--conversation-key-map", '{"from": "role"}', "--apply-chat-template-kwargs", '{"enable_thinking": false}'),
    )
    assert args.prompt_data == ["train.jsonl", "more.jsonl"]
    assert args.eval_prompt_data == {"": "eval.jsonl", "harmless": "harmless.jsonl"}
    assert (args.shuffle, args.share_prompt) == (False, False)
    assert args.conversation_key_map == {"from": "role"}
    assert args.apply_chat_template_kwargs == {"enable_thinking": False}
    assert parse().eval_prompt_data == {}, "one parse must not leak its sets into the next"


def test_pairs_of_flags():
    assert parse("--no-bf16").bf16 is False
    assert parse("--bf16").bf16 is True
    args = parse_args(["--loss-type", "dpo", *BASE[:4], "--num-epoch", "3"])
    assert (args.num_rollout, args.num_epoch) == (None, 3)


BAD_VALUES = {
    ("--lr", "nan"): "--lr: must be a number, at least 0, not nan",
    ("--lr", "fast"): "--lr: must be a number, at least 0, not 'fast'",
    ("--lr", "inf"): "--lr: must be a number, at least 0, not inf",
    ("--weight-decay", "-0.1"): "--weight-decay: must be a number, at least 0, not -0.1",
    ("--adam-beta1", "1"): "--adam-beta1: must be a number, at least 0 and below 1, not 1",
    ("--adam-beta2", "1.5"): "--adam-beta2: must be a number, at least 0 and below 1, not 1.5",
    ("--adam-eps", "0"): "--adam-eps: must be a number, above 0, not 0",
    ("--lr-warmup-fraction", "1"): "--lr-warmup-fraction: must be a number, at least 0 and below 1, not 1",
    ("--global-batch-size", "0"): "--global-batch-size: must be a whole number, at least 1, not 0",
    ("--num-rollout", "1.5"): "--num-rollout: must be a whole number, at least 1, not '1.5'",
    ("--seed", "-1"): "--seed: must be a whole number, at least 0 and at most 4294967295, not -1",
    ("--seed", "4294967296"): "--seed: must be a whole number, at least 0 and at most 4294967295, not 4294967296",
    ("--task-type", "x"): "--task-type: invalid choice: 'x' (choose from 'causal_lm')",
    ("--dpo-beta", "-0.1"): "--dpo-beta must be a finite number above 0, got -0.1",
    ("--dpo-beta", "nan"): "--dpo-beta: must be a number, not nan",
    ("--conversation-key-map", "{"): "--conversation-key-map: must be a JSON object, but '{' is not JSON: "
    "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
    ("--conversation-key-map", '{"a": 1}'): "--conversation-key-map: must map strings to strings, but 'a' maps to 1",
    ("--apply-chat-template-kwargs", "[1]"): "--apply-chat-template-kwargs: must be a JSON object such as "
    "'{\"key\": \"value\"}', not '[1]'",
    ("--eval-prompt-data", "a", "b", "c"): "--eval-prompt-data takes [NAME] PATH, not 3 values; repeat the flag for each set",
    ("--eval-prompt-data", "more.jsonl", "eval.jsonl"): "--eval-prompt-data takes [NAME] PATH, and 'more.jsonl' is not "
    "a plain name; repeat the flag for each set",
    ("--eval-prompt-data", "a/b", "eval.jsonl"): "--eval-prompt-data takes [NAME] PATH, and 'a/b' is not a plain name; "
    "repeat the flag for each set",
    ("--eval-prompt-data", "eval.jsonl", "--eval-prompt-data", "more.jsonl"): "--eval-prompt-data gives the set "
    "without a name twice (eval.jsonl, more.jsonl); give each set its own name",
    ("--eval-prompt-data", "x", "eval.jsonl", "--eval-prompt-data", "x", "more.jsonl"): "--eval-prompt-data gives the "
    "set 'x' twice (eval.jsonl, more.jsonl); give each set its own name",
}


@pytest.mark.parametrize("extra", BAD_VALUES, ids=" ".join)
def test_a_bad_value_names_flag_rule_and_value(extra):
    with pytest.raises(UserError) as caught:
        parse(*extra)
    assert str(caught.value) == BAD_VALUES[extra]


UNKNOWN = {
    ("--beta", "0.1"): "unknown flag --beta: did you mean --dpo-beta?",
    ("--max_length=8",): "unknown flag --max_length: did you mean --preference-max-length?",
    ("--max-tokens-per-gp", "8"): "unknown flag --max-tokens-per-gp: did you mean --max-tokens-per-gpu?",
    ("--xyzzy",): "unknown flag --xyzzy: see --help for all flags",
    ("--no-shuffle", "stray"): "unexpected argument 'stray': no flag takes it; see --help",
}


@pytest.mark.parametrize("extra", UNKNOWN, ids=" ".join)
def test_an_unknown_flag_names_the_nearest(extra):
    with pytest.raises(UserError) as caught:
        parse(*extra)
    assert str(caught.value) == UNKNOWN[extra]


def test_an_unknown_flag_is_told_before_a_missing_one():
    with pytest.raises(UserError, match=r"^unknown flag --hf_checkpoint: did you mean --hf-checkpoint[?]$"):
        parse_args(["--loss-type", "dpo", "--hf_checkpoint", "hf"])


def test_the_loss_is_built_from_its_flags():
    assert build_objective(parse("--dpo-beta", "0.3", "--dpo-reference-free")) == DPO(beta=0.3, reference_free=True)
    args = parse(loss="rm")
    assert build_objective(args) == RewardModel()
    assert not any(key.startswith("dpo_") for key in vars(args)), "the arguments hold the chosen loss's flags only"


def test_another_losss_flag_is_an_error():
    with pytest.raises(UserError, match=r"^--dpo-beta belongs to --loss-type dpo, but this run has --loss-type rm$"):
        parse("--dpo-beta", "0.1", loss="rm")


@dataclasses.dataclass(frozen=True, slots=True)
class Toy(Objective):
    """A loss with every kind of hyper-parameter."""

    metrics = ()
    label_smoothing: float = dataclasses.field(default=0.25, metadata={"help": "share of flipped labels"})
    steps: int = dataclasses.field(default=2, metadata={"help": "how many"})
    kind: Literal["a", "b"] = dataclasses.field(default="a", metadata={"help": "which"})
    title: str = dataclasses.field(default="t", metadata={"help": "what"})
    averaged: bool = dataclasses.field(default=True, metadata={"help": "mean over tokens"})

    def __call__(self, scores):
        return scores.values, {}

    def __post_init__(self):
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"label_smoothing must be at least 0 and below 0.5, got {self.label_smoothing}")


def test_a_new_loss_needs_no_line_in_the_parser(monkeypatch):
    for module in (arguments, loss_flags):
        monkeypatch.setattr(module, "OBJECTIVES", {"dpo": DPO, "toy": Toy})
    assert build_objective(parse(loss="toy")) == Toy()
    flags = ("--toy-label-smoothing", "0.1", "--toy-steps", "3", "--toy-kind", "b", "--toy-title", "x")
    assert build_objective(parse(*flags, "--no-toy-averaged", loss="toy")) == Toy(0.1, 3, "b", "x", False)
    assert parse(loss="toy").lr == 5e-7
    with pytest.raises(UserError, match=r"^--toy-label-smoothing must be at least 0 and below 0.5, got 0.5$"):
        parse("--toy-label-smoothing", "0.5", loss="toy")
    monkeypatch.setattr(Toy, "__annotations__", {**Toy.__annotations__, "steps": list})
    with pytest.raises(TypeError, match="has no flag: use bool, int, float, str or Literal"):
        build_parser()


def test_help_names_every_group_flag_and_default(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as caught:
        parse_args(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    groups = ("objective", "model and checkpoints", "data", "training", "optimizer and schedule")
    for group in (*groups, "parallelism and memory", "logging"):
        assert f"\n{group}:\n" in text
    words = " ".join(text.split())
    assert "--weight-decay X decoupled weight decay, as in AdamW (default: 0.0)" in words
    assert "--lr X peak learning rate (default: 5e-7 for a policy, 1e-5 for a reward model)" in words
    assert "--eval-prompt-data [NAME] PATH held-out pairs" in words
    assert "--dpo-beta X dpo: " in words
    assert "(default: None)" not in words
    assert "(default: [])" not in words
    assert all(len(line) <= 120 for line in text.splitlines())


def test_every_flag_is_documented():
    for action in build_parser()._actions:
        assert action.help, action.option_strings
        assert not action.help.endswith("."), action.option_strings


def test_arguments_come_from_the_process_by_default(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train", "--loss-type", "rm", *BASE])
    assert parse_args().loss_type == "rm"
    assert math.isclose(parse_args().lr, 1e-5)
