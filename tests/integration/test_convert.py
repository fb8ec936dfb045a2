"""`relax.convert` end to end: both directions and back, what training makes of the result, and what is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.integration.command import ENVIRONMENT, Ended, Flags, Workplace, command_line, contents, timeless
from tests.integration.conversion_memory import make
from tests.integration.test_torchrun import start_ranks
from tests.models import CHATML, FAMILIES, save_tiny

pytestmark = pytest.mark.integration


def convert(place: Workplace, command: str, *, file_limit: int | None = None, **flags: Any) -> Ended:
    """`python -m relax.convert command` in the place, to its end."""
    arguments = [command, *command_line(flags)]
    running = place.server.start(arguments, directory=place.directory, module="relax.convert", file_limit=file_limit)
    return running.wait()


def converted(place: Workplace, command: str, **flags: Any) -> str:
    """The console of a conversion that must end well."""
    ended = convert(place, command, **flags)
    assert ended.code == 0 and not ended.err, ended.err[-3000:]
    return ended.out


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Every stored tensor, by name."""
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("head", ["lm", "scalar"])
@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_keeps_every_bit_and_the_head(fresh_place: Workplace, family: str, head: str) -> None:
    place, tied = fresh_place, family == "llama"
    save_tiny(place.path("hf"), family, head=head, dtype=torch.bfloat16, shard_size="100KB", tie_word_embeddings=tied)
    out = converted(place, "hf-to-mcore", hf_checkpoint="hf", save="mcore")
    assert "in bfloat16, peak memory" in out and "mcore is for --load with --finetune, and for --ref-load" in out
    assert place.path("mcore/latest_checkpointed_iteration.txt").read_text() == "release"
    assert json.loads(place.path("mcore/release/relax_run.json").read_text()) == {"head": head, "converted_from": "hf"}
    out = converted(place, "verify", hf_checkpoint="hf", load="mcore")
    before = tensors(place.path("hf"))
    assert out.startswith(f"equal: {len(before)} tensors compared in bfloat16, worst difference 0 in ")
    converted(place, "mcore-to-hf", load="mcore", hf_checkpoint="hf", save="back")
    after = tensors(place.path("back"))
    assert after.keys() == before.keys() and all(
        torch.equal(after[n], t) and after[n].dtype == t.dtype for n, t in before.items()
    )
    assert ("score.weight" in after) == (head == "scalar")
    assert "Converted by relax." in place.path("back/README.md").read_text()
    auto = transformers.AutoModelForCausalLM if head == "lm" else transformers.AutoModelForSequenceClassification
    _, info = auto.from_pretrained(place.path("back"), output_loading_info=True)
    assert not any(info.values())


LAYOUTS: dict[str, Flags] = {
    "one": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
}


@pytest.fixture(scope="module")
def odd(place: Workplace) -> Workplace:
    """model/ has a vocabulary that two ranks must pad; mcore/ is converted from it, other/ from other weights."""
    for name, seed in (("model", 0), ("other", 1)):
        save_tiny(place.path(name), "qwen3", vocab_size=271, seed=seed)
        converted(place, "hf-to-mcore", hf_checkpoint=name, save=f"{name}-mcore")
    return place


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_takes_it_in_any_layout(odd: Workplace, assets: Path, layout: str) -> None:
    """As --load --finetune and --ref-load it gives, to the bit, what the directories give that it was made from."""
    flags = {"hf_checkpoint": "other", "eval_prompt_data": assets / "eval.jsonl", "num_rollout": 1, **LAYOUTS[layout]}
    own = {"finetune": True, "load": "model-mcore", "ref_load": "other-mcore"}
    for name, sources in (("hf", {"hf_checkpoint": "model", "ref_load": "model"}), ("mcore", own)):
        ranks = [odd.start(exp_name=f"{layout}-{name}", **{**flags, **sources})] if layout == "one" else None
        for rank in ranks or start_ranks(odd, exp_name=f"{layout}-{name}", **{**flags, **sources}):
            ended = rank.wait()
            assert ended.code == 0, ended.err[-3000:]
    plain, taken = (timeless(odd.log(f"{layout}-{name}")) for name in ("hf", "mcore"))
    for name in ("logps_chosen", "logps_rejected"):
        assert taken[0][f"eval/dpo_{name}"] == plain[0][f"eval/dpo_{name}"]
        assert taken[1][f"train/dpo/{name}"] == plain[1][f"train/dpo/{name}"] != taken[1][f"train/dpo/ref_{name}"]


def test_another_dtype_is_rounded_once_and_compared_as_asked(odd: Workplace) -> None:
    converted(odd, "hf-to-mcore", hf_checkpoint="model", save="half", dtype="bfloat16")
    start = tensors(odd.path("model"))
    worst = max((tensor - tensor.bfloat16()).abs().max().item() for tensor in start.values())
    name = max(start, key=lambda name: (start[name] - start[name].bfloat16()).abs().max().item())
    message = convert(odd, "verify", hf_checkpoint="model", load="half").error
    assert message.startswith(f"--hf-checkpoint model and --load half/release differ in {len(start)} tensors: ")
    assert message.endswith(f"compared in float32, worst difference {worst:g} in {name}")
    assert converted(odd, "verify", hf_checkpoint="model", load="half", dtype="bfloat16").startswith("equal: ")
    message = convert(odd, "verify", hf_checkpoint="other", load="half", dtype="bfloat16").error
    assert "differ in" in message and "compared in bfloat16" in message
    converted(odd, "mcore-to-hf", load="half", hf_checkpoint="model", save="half-hf")
    after = tensors(odd.path("half-hf"))
    assert all(torch.equal(after[name], tensor.bfloat16()) for name, tensor in start.items())


def test_mixed_dtypes_are_kept_in_the_widest(odd: Workplace) -> None:
    odd.path("mixed").mkdir()
    for file in odd.path("model").iterdir():
        odd.path("mixed").joinpath(file.name).write_bytes(file.read_bytes())
    start = tensors(odd.path("model"))
    mixed = {name: tensor if "norm" in name else tensor.bfloat16() for name, tensor in start.items()}
    save_file(mixed, odd.path("mixed/model.safetensors"), metadata={"format": "pt"})
    assert "in float32" in converted(odd, "hf-to-mcore", hf_checkpoint="mixed", save="mixed-mcore")
    assert "compared in float32" in converted(odd, "verify", hf_checkpoint="mixed", load="mixed-mcore")


def test_a_step_of_a_run_is_exported(odd: Workplace, assets: Path) -> None:
    template = {"chat_template": CHATML.replace("<|im_end|>", "<|im_end|> ")}
    flags = {"apply_chat_template_kwargs": json.dumps(template), "save_hf": "run-hf-{iteration}"}
    odd.succeed(exp_name="run", hf_checkpoint="model", num_rollout=2, save="run", save_interval=1, **flags)
    for step in (1, 2):
        converted(odd, "mcore-to-hf", load="run", ckpt_step=step, hf_checkpoint="model", save=f"step-{step}")
        assert contents(odd.path(f"step-{step}")) == contents(odd.path(f"run-hf-{step}"))
        assert odd.path(f"step-{step}/chat_template.jinja").read_text() == template["chat_template"]


def test_a_conversion_cut_short_leaves_nothing_under_the_final_name(odd: Workplace) -> None:
    message = convert(odd, "hf-to-mcore", hf_checkpoint="model", save="cut", file_limit=100_000).error
    assert message.startswith("--save cut: release cannot be saved: File too large; no checkpoint is there yet")
    assert not list(odd.path("cut").iterdir())
    message = convert(odd, "mcore-to-hf", load="model-mcore", hf_checkpoint="model", save="cut-hf", file_limit=100_000).error
    assert message.startswith("cut-hf: the export cannot be written") and not odd.path("cut-hf").exists()
    odd.path("cut/.release.tmp").mkdir()  # as a kill would leave it
    odd.path("cut/latest_checkpointed_iteration.txt").write_text("release")
    converted(odd, "hf-to-mcore", hf_checkpoint="model", save="cut")
    assert sorted(path.name for path in odd.path("cut").iterdir()) == ["latest_checkpointed_iteration.txt", "release"]


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        ("hf-to-mcore", {"hf_checkpoint": "model"}, "hf-to-mcore needs --save"),
        ("hf-to-mcore", {"hf_checkpoint": "model", "save": "x", "load": "other-mcore"}, "--load has no effect on hf-to-mcore"),
        ("hf-to-mcore", {"hf_checkpoint": "model", "save": "other"}, "--save other is there already"),
        ("mcore-to-hf", {"hf_checkpoint": "model", "load": "none", "save": "x"}, "--load none: no complete checkpoint there"),
        ("mcore-to-hf", {"hf_checkpoint": "model", "load": "model", "save": "x"}, "--load model is not a directory of"),
        ("mcore-to-hf", {"hf_checkpoint": "wide", "load": "model-mcore", "save": "x"}, "--load model-mcore/release holds"),
        ("verify", {"hf_checkpoint": "model", "load": "model-mcore", "save": "x"}, "--save has no effect on verify"),
        ("verify", {"hf_checkpoint": "model", "load": "rm-mcore"}, "model: the weights do not fit its config.json"),
        ("guess", {}, "COMMAND: invalid choice: 'guess'"),
    ],
)  # fmt: skip
def test_what_cannot_be_converted_is_said(odd: Workplace, command: str, flags: Flags, message: str) -> None:
    if not odd.path("wide").exists():
        save_tiny(odd.path("wide"), "qwen3", vocab_size=271, intermediate_size=96)
        save_tiny(odd.path("rm"), "qwen3", vocab_size=271, head="scalar")
        converted(odd, "hf-to-mcore", hf_checkpoint="rm", save="rm-mcore")
    assert convert(odd, command, **flags).error.startswith(message)
    assert not odd.path("x").exists()


@pytest.mark.parametrize(("experts", "layers"), [(0, 12), (32, 4)])
def test_memory_is_a_shard_and_a_layer(tmp_path: Path, experts: int, layers: int) -> None:
    """Peak memory above that of a tiny model's conversion, in each direction, for a model of many shards."""
    make(tmp_path / "tiny", layers=2, hidden=64)
    make(tmp_path / "large", layers=layers, hidden=1024, experts=experts)
    # The allocator's default threshold moves, and what it keeps for small blocks would be measured with the tensors.
    environment = {**os.environ, **ENVIRONMENT, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    worker = Path(__file__).with_name("conversion_memory.py")
    done = subprocess.run([sys.executable, worker, tmp_path], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    raised = json.loads(done.stdout.splitlines()[-1])
    shards = [file.stat().st_size for file in tmp_path.glob("large/*.safetensors")]
    layer = 2 * 1024**2 * (4 + (experts * 3 // 2 or 9))  # bf16: attention, and MLP or experts
    limit = 1.1 * max(shards) + layer
    assert len(shards) >= 8 and sum(shards) > 2 * limit
    assert all(more < limit for more in raised.values()), (raised, limit)
