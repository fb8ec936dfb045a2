"""Attention: all implementations give the same for blocks of every kind, and each is chosen where it can work.

No variable-length kernel runs on a CPU: a reference of the same signature stands in, so that what is tested is the index
arithmetic. benchmarks/gpu_check.sh compares the kernels themselves on a GPU.
"""

from functools import partial
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from relax.backend.model.layout import PackedLayout, build_layout
from relax.backend.ops import PLAIN, choose_ops
from relax.backend.ops.cpu import attention as on_cpu
from relax.backend.ops.cpu import products
from relax.backend.ops.cpu.products import cpu_multiplies_bf16
from relax.backend.ops.cuda import attention as on_cuda
from relax.errors import UserError
from tests.models import ops_for, random_pairs

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HEADS, GROUPS, WIDTH = 4, 2, 8


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_ends: torch.Tensor,
    key_ends: torch.Tensor,
    max_queries: int,
    max_keys: int,
    *,
    scale: float,
) -> torch.Tensor:
    """Variable-length attention from its definition: each sequence by itself, causal from the bottom right."""
    assert query_ends.dtype == key_ends.dtype == torch.int32
    sizes = query_ends.diff(), key_ends.diff()
    assert (int(sizes[0].max()), int(sizes[1].max())) == (max_queries, max_keys)
    assert (int(query_ends[-1]), int(key_ends[-1])) == (query.size(0), key.size(0))
    out = []
    parts = zip(*(x.split(n.tolist()) for x, n in ((query, sizes[0]), (key, sizes[1]), (value, sizes[1]))), strict=True)
    for q, k, v in parts:
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        seen = torch.ones(q.size(0), k.size(0), dtype=torch.bool).tril(k.size(0) - q.size(0))
        out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v))
    return torch.cat(out)


def varlen(*args: Any, window_size: tuple[int, int], enable_gqa: bool, num_splits: int, **rest: Any) -> torch.Tensor:
    assert window_size == (-1, 0)  # causal
    assert enable_gqa and num_splits == 1
    return reference(*args, **rest)


def flash(*args: Any, softmax_scale: float, causal: bool, deterministic: bool) -> torch.Tensor:
    assert causal and not deterministic
    return reference(*args, scale=softmax_scale)


def layouts() -> list[PackedLayout]:
    """Plain, shared, mixed, padded, empty, and both shards under context parallelism."""
    pairs = random_pairs(4)
    made = [
        build_layout(pairs, [share] * 4, head="lm", device=CPU, multiple=multiple)
        for share, multiple in ((False, 1), (True, 1), (True, 64))
    ]
    made.append(build_layout(pairs, [True, False, False, True], head="scalar", device=CPU))
    made.append(build_layout([], [], head="lm", device=CPU, multiple=8))
    made += [build_layout(pairs, [True] * 4, head="lm", device=CPU, cp_rank=rank, cp_size=2) for rank in (0, 1)]
    return made


def draw(layout: PackedLayout, generator: torch.Generator, dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries for the layout's rows, keys and values for all that they see."""
    keys = max(k1 for block in layout.blocks for _, k1 in block.keys)
    sizes = ((layout.ids.size(0), HEADS), (keys, GROUPS), (keys, GROUPS))
    return [torch.randn(*size, WIDTH, dtype=torch.float64, generator=generator).to(dtype).requires_grad_() for size in sizes]


@pytest.mark.parametrize("name", ["varlen", "flash", "sdpa"])
@pytest.mark.parametrize("at", range(7))
def test_implementations_agree(name: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_cuda, "kernel_of", {"varlen": varlen, "flash": flash}.get)
    monkeypatch.setattr(on_cpu, "QUERIES", 3)  # several calls for a block
    layout = layouts()[at]
    inputs = draw(layout, torch.Generator().manual_seed(at), torch.float64)
    found = []
    on_a_gpu = PLAIN.attention if name == "sdpa" else partial(on_cuda.in_one_call, name=name)
    for attend in (ops_for(torch.float64).attention, on_a_gpu):
        out = attend(*inputs, layout, 0.3)
        found.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_backward_takes_few_queries_at_a_time_where_keys_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, space = layouts()[1], {}
    monkeypatch.setattr(products, "_SCRATCH", space)
    inputs = draw(layout, torch.Generator().manual_seed(0), torch.float64)
    grads = []
    for scores in (1 << 22, most := 4 * HEADS * max(block.num_keys for block in layout.blocks)):
        monkeypatch.setattr(on_cpu, "SCORES", scores)
        space.clear()
        grads.append(torch.autograd.grad(ops_for(torch.float64).attention(*inputs, layout, 0.3).square().sum(), inputs))
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)
    assert space["attention", torch.float64].numel() <= 2 * 1.5 * most  # scores and their gradients, of even calls


@pytest.mark.usefixtures("elementwise")
def test_a_hidden_key_may_score_beyond_all_numbers() -> None:
    layout = layouts()[0]
    inputs = draw(layout, torch.Generator().manual_seed(0), torch.float32)
    with torch.no_grad():
        inputs[1][layout.blocks[0].q1 - 1] *= 1e4  # seen by the block's last query alone
    found = torch.autograd.grad(ops_for(torch.float32).attention(*inputs, layout, 0.3).square().sum(), inputs)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    exact = torch.autograd.grad(PLAIN.attention(*wide, layout, 0.3).square().sum(), wide)
    for mine, theirs, tolerance in zip(found, exact, (1e-2, 1e-4, 1e-4), strict=True):  # the key magnifies rounding
        assert torch.isfinite(mine).all()
        torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=tolerance * float(theirs.abs().max()))


@pytest.mark.usefixtures("elementwise")
@pytest.mark.parametrize("at", range(7))
def test_half_precision_rounds_once_and_is_what_backward_keeps(at: int) -> None:
    """On a CPU: values are the fp32 ones rounded (with bf16 instructions the kernel rounds probabilities, too); gradients
    differ by the rounding of the output that backward finds."""
    layout, kept = layouts()[at], []
    inputs = draw(layout, torch.Generator().manual_seed(at), torch.bfloat16)
    wide = [x.detach().float().requires_grad_() for x in inputs]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = ops_for(torch.bfloat16).attention(*inputs, layout, 0.3)
    expected = ops_for(torch.float32).attention(*wide, layout, 0.3)
    exact = {"rtol": 2**-7, "atol": 1e-2} if cpu_multiplies_bf16() else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(out, expected.bfloat16(), **exact)
    grads = [torch.autograd.grad(x.square().sum(), x_in) for x, x_in in ((out, inputs), (expected, wide))]
    for mine, theirs in zip(*grads, strict=True):
        assert float((mine.float() - theirs).norm()) <= 2e-2 * float(theirs.norm())
    rows = layout.ids.size(0)
    assert sum(x.nbytes for x in kept) == sum(x.nbytes for x in (*inputs, out)) + 4 * rows * HEADS  # and the log-sum-exps


@pytest.mark.usefixtures("elementwise")
@pytest.mark.parametrize("at", range(7))
def test_fp32_gradients_are_the_exact_ones(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_cpu, "QUERIES", 3)  # several calls for a block
    layout = layouts()[at]
    inputs = draw(layout, torch.Generator().manual_seed(at), torch.float32)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    found = torch.autograd.grad(ops_for(torch.float32).attention(*inputs, layout, 0.3).square().sum(), inputs)
    exact = torch.autograd.grad(PLAIN.attention(*wide, layout, 0.3).square().sum(), wide)
    for mine, theirs in zip(found, exact, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("elementwise")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_rotation_is_transformers_own(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(5, 1, 3, 8, dtype=torch.float64, generator=generator).to(dtype) for _ in range(2))
    angles = torch.randn(5, 4, dtype=torch.float64, generator=generator)
    cos, sin = (f(angles).to(dtype) for f in (torch.cos, torch.sin))
    found = []
    for rotate in (
        lambda x: ops_for(dtype).rotate(x, cos[:, None, None], sin[:, None, None]),
        lambda x: apply_rotary_pos_emb(x, x, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1), unsqueeze_dim=1)[0],
    ):
        own = x.squeeze(1).clone().requires_grad_()  # [positions, heads, head_dim]
        rotated = rotate(own[:, None]).view(own.shape) if not found else rotate(own)
        found.append((rotated, torch.autograd.grad(rotated, own, grad.squeeze(1))[0]))
    tolerance = 8 * torch.finfo(dtype).eps if dtype != torch.bfloat16 else 2**-7
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def test_keys_are_gathered_only_where_blocks_take_others_than_their_own() -> None:
    plain, shared, *_, shard = layouts()
    assert plain.varlen_call().key_rows is None
    rows = shared.varlen_call().key_rows
    assert rows is not None and rows.numel() > shared.ids.numel()
    assert shard.varlen_call().key_rows is not None
    assert shared.varlen_call() is shared.varlen_call()  # made once for all layers


def test_auto_takes_the_fastest_that_works_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_cuda, "kernel_of", {"varlen": varlen, "flash": flash}.get)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    bf16, fp32 = torch.bfloat16, torch.float32

    def chosen(asked: str, device: torch.device, dtype: torch.dtype, *, head_dim: int = 64) -> tuple[str, str]:
        return choose_ops(device, dtype, head_dim=head_dim, attention=asked).choices["attention"]

    assert chosen("auto", CPU, bf16) == ("sdpa", "variable-length kernels need a GPU")
    assert chosen("auto", CUDA, fp32) == ("sdpa", "variable-length kernels need bf16, not float32")
    assert chosen("auto", CUDA, bf16) == ("flash", "the fastest that is installed")
    assert chosen("varlen", CUDA, bf16) == ("varlen", "asked for")
    assert chosen("sdpa", CUDA, bf16) == ("sdpa", "asked for")
    monkeypatch.setattr(on_cuda, "kernel_of", {"varlen": varlen}.get)
    assert chosen("auto", CUDA, bf16) == ("varlen", "the fastest that is installed")
    monkeypatch.setattr(on_cuda, "kernel_of", {}.get)
    assert chosen("auto", CUDA, bf16)[0] == "sdpa"
    monkeypatch.setattr(on_cuda, "kernel_of", {"varlen": varlen}.get)
    assert chosen("auto", CUDA, bf16, head_dim=20)[1].endswith("multiple of 8 up to 256, not 20")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert chosen("auto", CUDA, bf16)[1].endswith("compute capability 8.0")


@pytest.mark.parametrize(
    ("asked", "device", "dtype", "why"),
    [
        ("varlen", CPU, torch.bfloat16, "need a GPU"),
        ("varlen", CUDA, torch.float32, "need bf16"),
        ("flash", CUDA, torch.bfloat16, "flash-attn package is not installed"),
    ],
)
def test_what_cannot_work_is_refused(
    asked: str, device: torch.device, dtype: torch.dtype, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_cuda, "kernel_of", {"varlen": varlen}.get)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(UserError, match=f"^--attention-backend {asked}: .*{why}"):
        choose_ops(device, dtype, head_dim=64, attention=asked)
