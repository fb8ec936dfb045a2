"""Check a device through the real command: the CPU's numbers, exact step 0, exact resume, and speed at Qwen3-0.6B's shape.

Models are random and made here. Prints a line per check, writes JSON where asked, and exits with 1 if a check fails.
"""

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tiny_qwen3 import TEMPLATE

ROOT = Path(__file__).parents[1]
TINY = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "norm_topk_prob": True}
QWEN3_06B = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}


def make_model(directory: Path, *, vocab_size: int, head_dim: int, shape: dict[str, int]) -> Path:
    """A random Qwen3 in bf16 with a byte tokenizer; a Qwen3 MoE where the shape has experts."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe" if "num_experts" in shape else "qwen3",
        vocab_size=vocab_size,
        head_dim=head_dim,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        **shape,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.save_pretrained(directory)
    return directory


def make_pairs(file: Path, *, count: int, prompt: int, answer: int) -> Path:
    """Random letters: `prompt` and about `answer` bytes, which are tokens here."""
    draw = random.Random(0)

    def text(size: int) -> str:
        return "".join(draw.choices("abcdefghij klmnop", k=size))

    rows = [
        {"prompt": text(prompt), "chosen": text(draw.randint(answer // 2, answer)), "rejected": text(answer - 8)}
        for _ in range(count)
    ]
    rows = [{k: [{"role": "user" if k == "prompt" else "assistant", "content": v}] for k, v in row.items()} for row in rows]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


class Check:
    """Runs the command, compares, keeps the results."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.results, self.failed = directory, {}, []

    def train(self, name: str, *flags: str) -> list[dict[str, float]]:
        """The log of one run."""
        log = ["--log-dir", str(self.directory / "log"), "--exp-name", name]
        cache = ["--data-cache-dir", str(self.directory / "cache")]
        command = [sys.executable, "-m", "relax.train", *flags, *log, *cache]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
        return [json.loads(line) for line in (self.directory / "log" / f"{name}.jsonl").read_text().splitlines()]

    def tell(self, name: str, ok: bool, value: Any) -> None:
        self.results[name] = {"ok": ok, "value": value}
        self.failed += [] if ok else [name]
        print(f"{'ok  ' if ok else 'FAIL'}  {name}: {value}", flush=True)


def numbers(log: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: v for k, v in line.items() if not k.startswith("perf/")} for line in log]


def check_numbers(check: Check, model: Path, pairs: Path, device: str, *, losses: tuple[str, ...]) -> None:
    for loss in losses:
        name = f"{model.name} {loss}"
        base = ["--loss-type", loss, "--hf-checkpoint", str(model), "--prompt-data", str(pairs), "--global-batch-size", "8"]
        base += ["--lr", "1e-4", "--max-tokens-per-gpu", "2048", "--num-rollout", "4"]
        one = check.train(f"{name}-cpu", *base, "--no-bf16", "--device", "cpu")
        other = check.train(f"{name}-device", *base, "--no-bf16", "--device", device)
        keys = (f"train/{loss}/loss", "train/grad_norm")
        worst = max(abs(a[k] - b[k]) / abs(a[k]) for a, b in zip(one, other, strict=True) for k in keys)
        check.tell(f"{name}: fp32 loss and gradient norm of four steps, relative to the CPU", worst < 2e-3, worst)
        save = ["--load", str(check.directory / name), "--save", str(check.directory / name), "--device", device]
        whole = check.train(f"{name}-whole", *base, "--device", device)
        if loss == "dpo":
            value = whole[0]["train/dpo/loss"]
            check.tell(f"{name}: bf16 loss of step 1 is ln 2", value == math.log(2), value)
        check.train(f"{name}-part", *base[:-1], "2", *save, "--lr-decay-style", "constant")
        resumed = check.train(f"{name}-part", *base, *save, "--lr-decay-style", "constant")
        straight = check.train(f"{name}-constant", *base, "--device", device, "--lr-decay-style", "constant")
        check.tell(f"{name}: resumed equals uninterrupted, bit for bit", numbers(resumed) == numbers(straight), "")


def check_attention(check: Check, device: str) -> None:
    """Each variable-length kernel in bf16 against attention block by block in fp32: values and gradients."""
    import numpy as np
    import torch

    from relax.backend.model.layout import build_layout
    from relax.backend.ops import choose_ops
    from relax.errors import UserError

    class Pair:
        prompt, *completions = (np.arange(size) for size in (300, 170, 230))

    on = torch.device(device)
    for name in ("varlen", "flash"):
        try:
            own = choose_ops(on, torch.bfloat16, head_dim=64, attention=name)
        except UserError as error:
            check.tell(f"attention: {name}", True, f"not checked: {error}")
            continue
        for share in (False, True):
            layout = build_layout([Pair()] * 3, [share] * 3, head="lm", device=on)
            torch.manual_seed(0)
            rows = layout.ids.numel()
            drawn = [torch.randn(rows, heads, 64, device=on, dtype=torch.bfloat16) for heads in (8, 2, 2)]
            found = []
            for ops, dtype in ((choose_ops(on, torch.float32, head_dim=64), torch.float32), (own, torch.bfloat16)):
                inputs = [x.to(dtype).requires_grad_() for x in drawn]
                out = ops.attention(*inputs, layout, 0.125)
                found.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), inputs)])
            worst = max(float((a - b.float()).norm() / a.norm()) for a, b in zip(*found, strict=True))
            what = "prompts shared" if share else "plain packs"
            check.tell(f"attention: {name}, {what}, values and gradients in norm", worst < 2e-2, worst)


def check_speed(check: Check, model: Path, pairs: Path, device: str, *, batch: int) -> None:
    for loss in ("dpo", "rm"):
        for share in ([], ["--no-share-prompt"]):
            log = check.train(
                f"speed-{loss}{'-unshared' if share else ''}",
                *("--loss-type", loss, "--hf-checkpoint", str(model), "--prompt-data", str(pairs), "--device", device),
                *("--global-batch-size", str(batch), "--num-rollout", "8", "--max-tokens-per-gpu", "16384", *share),
            )
            steady = log[3:]
            names = ("perf/pairs_per_s", "perf/tokens_per_s_per_gpu", "perf/mfu", "perf/peak_memory_gib")
            value = {name: sorted(line[name] for line in steady)[len(steady) // 2] for name in names}
            check.tell(f"{loss}, Qwen3-0.6B shape, 1,024 tokens{', prompts not shared' if share else ''}", True, value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny model in the speed check, to try the script itself")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        check = Check(directory)
        tiny = make_model(directory / "dense", vocab_size=1000, head_dim=64, shape=TINY)
        experts = make_model(directory / "experts", vocab_size=1000, head_dim=64, shape={**TINY, **EXPERTS})
        few = make_pairs(directory / "a.jsonl", count=32, prompt=80, answer=60)
        check_attention(check, args.device)
        check_numbers(check, tiny, few, args.device, losses=("dpo", "rm"))
        check_numbers(check, experts, few, args.device, losses=("dpo",))
        large = tiny if args.small else make_model(directory / "large", vocab_size=151_936, head_dim=128, shape=QWEN3_06B)
        batch = 2 if args.small else 32
        speed_pairs = make_pairs(directory / "b.jsonl", count=8 * batch, prompt=500, answer=500)
        check_speed(check, large, speed_pairs, args.device, batch=batch)
    if args.output:
        args.output.write_text(json.dumps(check.results, indent=1) + "\n")
    sys.exit(1 if check.failed else 0)


if __name__ == "__main__":
    main()
