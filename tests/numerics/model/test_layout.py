"""The layout: rows, positions, blocks and scored rows of known packs, and scores that do not depend on it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from relax.backend.model import layers
from relax.backend.model.layers import PackedAttention
from relax.backend.model.layout import Block, PackedLayout, build_layout
from tests.engines import CPU, make_pairs
from tests.models import TokenGroup, TokenPair, load, ops_for, save_tiny

SIZES = [(7, 5, 9), (12, 1, 4), (1, 6, 6), (20, 3, 1), (4, 8, 2)]


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


PAIR = TokenPair(prompt=ints(1, 2, 3), chosen=ints(4, 5), rejected=ints(6))


def layout_of(pairs: Any, shared: Any = False, *, head: Any = "lm", **options: Any) -> PackedLayout:
    flags = [shared] * len(pairs) if isinstance(shared, bool) else shared
    return build_layout(pairs, flags, head=head, device=CPU, **options)


# What a pack holds


def test_a_shared_prompt_stands_once() -> None:
    layout = layout_of([PAIR], True)
    assert layout.ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert layout.positions.tolist() == [0, 1, 2, 3, 4, 3]
    assert layout.blocks == (Block(0, 5, ((0, 5),)), Block(5, 6, ((0, 3), (5, 6))))
    assert layout.score_rows.tolist() == [2, 3, 2]  # the prompt's last row predicts both first tokens
    assert layout.targets.tolist() == [4, 5, 6]
    assert layout.target_counts.tolist() == [2, 1]


def test_an_unshared_prompt_stands_before_each_answer() -> None:
    layout = layout_of([PAIR])
    assert layout.ids.tolist() == [1, 2, 3, 4, 5, 1, 2, 3, 6]
    assert layout.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert layout.blocks == (Block(0, 5, ((0, 5),)), Block(5, 9, ((5, 9),)))
    assert layout.score_rows.tolist() == [2, 3, 7]
    assert layout.targets.tolist() == [4, 5, 6]
    assert layout.target_counts.tolist() == [2, 1]


@pytest.mark.parametrize(("shared", "rows"), [(True, [4, 5]), (False, [4, 8])])
def test_a_scalar_head_reads_the_last_token_by_length(shared: bool, rows: list[int]) -> None:
    layout = layout_of([PAIR], shared, head="scalar")
    assert layout.score_rows.tolist() == rows
    assert layout.ids[layout.score_rows].tolist() == [5, 6]
    assert layout.target_counts.tolist() == [1, 1]


def test_pairs_follow_each_other_in_order() -> None:
    pairs = make_pairs(SIZES)
    shared = [True, False, True, False, True]
    layout = layout_of(pairs, shared)
    expected = [
        part
        for pair, once in zip(pairs, shared, strict=True)
        for part in (pair.prompt, pair.chosen, *(() if once else (pair.prompt,)), pair.rejected)
    ]
    assert layout.ids.tolist() == np.concatenate(expected).tolist()
    assert layout.targets.tolist() == np.concatenate([x for p in pairs for x in (p.chosen, p.rejected)]).tolist()
    assert layout.target_counts.tolist() == [n for _, chosen, rejected in SIZES for n in (chosen, rejected)]
    assert layout.num_groups == len(pairs)


def test_a_prompt_stands_once_for_any_number_of_completions() -> None:
    groups = [TokenGroup(ints(1, 2), (ints(3, 4), ints(5), ints(6, 7))), TokenGroup(ints(8), (ints(9),))]
    layout = layout_of(groups, [True, False])
    assert layout.ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert layout.positions.tolist() == [0, 1, 2, 3, 2, 2, 3, 0, 1]
    keys = ((0, 4),), ((0, 2), (4, 5)), ((0, 2), (5, 7)), ((7, 9),)
    assert layout.blocks == tuple(Block(q0, q1, k) for (q0, q1), k in zip([(0, 4), (4, 5), (5, 7), (7, 9)], keys, strict=True))
    assert layout.score_rows.tolist() == [1, 2, 1, 1, 5, 7] and layout.targets.tolist() == [3, 4, 5, 6, 7, 9]
    assert layout.target_counts.tolist() == [2, 1, 2, 1] and layout.num_groups == 2
    assert layout_of(groups).ids.tolist() == [1, 2, 3, 4, 1, 2, 5, 1, 2, 6, 7, 8, 9]


@pytest.mark.parametrize(("multiple", "rows"), [(1, 6), (2, 6), (4, 8), (16, 16)])
def test_padding_is_a_block_of_its_own(multiple: int, rows: int) -> None:
    plain, layout = layout_of([PAIR], True), layout_of([PAIR], True, multiple=multiple)
    assert layout.ids.tolist() == plain.ids.tolist() + [0] * (rows - 6)
    assert layout.positions.tolist() == plain.positions.tolist() + list(range(rows - 6))
    assert layout.blocks == plain.blocks + ((Block(6, rows, ((6, rows),)),) if rows > 6 else ())
    assert layout.score_rows.tolist() == plain.score_rows.tolist()


@pytest.mark.parametrize(("multiple", "cp_size", "rows"), [(1, 1, 1), (8, 1, 8), (1, 2, 2), (2, 4, 4)])
def test_no_pairs_give_the_shortest_pack(multiple: int, cp_size: int, rows: int) -> None:
    layout = layout_of([], multiple=multiple, cp_size=cp_size)
    assert layout.ids.tolist() == [0] * rows
    assert layout.num_groups == 0
    assert layout.score_rows.shape == layout.targets.shape == layout.target_counts.shape == (0,)


def test_masks_are_bottom_right_causal_and_made_once() -> None:
    layout = layout_of([TokenPair(prompt=PAIR.prompt, chosen=PAIR.rejected, rejected=PAIR.chosen)], True)
    chosen, rejected = layout.blocks
    assert layout.mask(chosen, CPU) is None
    mask = layout.mask(rejected, CPU)
    assert mask is not None and mask.tolist() == [[True] * 4 + [False], [True] * 5]
    assert layout.mask(rejected, CPU) is mask


# What a query sees


def seen(layout: PackedLayout, *, columns: int) -> np.ndarray:
    """Which whole-pack rows each local row attends to, bool [rows, columns]; every row is in one block."""
    matrix = np.zeros((layout.ids.size(0), columns), dtype=bool)
    covered = np.zeros(len(matrix), dtype=int)
    for block in layout.blocks:
        keys = np.concatenate([np.arange(*r) for r in block.keys])
        assert len(keys) == block.num_keys and block.is_square == (len(keys) == block.q1 - block.q0)
        covered[block.q0 : block.q1] += 1
        for q in range(block.q0, block.q1):
            matrix[q, keys[: len(keys) - (block.q1 - 1 - q)]] = True
    assert (covered == 1).all()
    return matrix


def sequences(pairs: Any, shared: Any, rows: int) -> np.ndarray:
    """The same from first principles: each sequence is a list of rows, and a row sees its sequence up to itself."""
    matrix, first = np.zeros((rows, rows), dtype=bool), 0
    for pair, once in zip(pairs, shared, strict=True):
        prompt = np.arange(first, first + len(pair.prompt))
        for i, completion in enumerate((pair.chosen, pair.rejected)):
            if i and not once:
                prompt = np.arange(first, first + len(pair.prompt))
            start = prompt[-1] + 1 if not (i and once) else first
            sequence = np.concatenate((prompt, np.arange(start, start + len(completion))))
            for at, row in enumerate(sequence):
                matrix[row, sequence[: at + 1]] = True
            first = start + len(completion)
    for row in range(first, rows):
        matrix[row, first : row + 1] = True
    return matrix


@pytest.mark.parametrize("shared", [[True] * 5, [False] * 5, [True, False, True, False, False]])
def test_a_row_sees_its_own_sequence_up_to_itself(shared: list[bool]) -> None:
    pairs = make_pairs(SIZES)
    layout = layout_of(pairs, shared, multiple=8)
    rows = layout.ids.size(0)
    assert (seen(layout, columns=rows) == sequences(pairs, shared, rows)).all()


# Context parallelism, without its processes


def shards(size: int, multiple: int, shared: Any, head: str = "lm") -> tuple[PackedLayout, list[PackedLayout]]:
    """The whole pack, and what each rank of `size` holds of it."""
    pairs = make_pairs(SIZES)
    whole = layout_of(pairs, shared, head=head, multiple=multiple * 2 * size)
    return whole, [layout_of(pairs, shared, head=head, multiple=multiple, cp_rank=rank, cp_size=size) for rank in range(size)]


def whole_rows(layout: PackedLayout, rank: int, size: int) -> np.ndarray:
    """Which whole-pack rows a rank holds: chunk `rank`, then chunk 2 * size - 1 - rank."""
    chunk = layout.ids.size(0) // 2
    return np.concatenate([np.arange(i * chunk, (i + 1) * chunk) for i in (rank, 2 * size - 1 - rank)])


@pytest.mark.parametrize("shared", [[True] * 5, [False] * 5, [True, False, True, False, False]])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("multiple", [1, 2])
@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_shards_together_are_the_whole(size: int, multiple: int, shared: list[bool], head: str) -> None:
    whole, parts = shards(size, multiple, shared, head)
    rows = whole.ids.size(0)
    ids, positions, matrix = np.full(rows, -1), np.full(rows, -1), np.zeros((rows, rows), dtype=bool)
    scored: list[list[tuple[int, int]]] = [[] for _ in whole.target_counts]
    for rank, part in enumerate(parts):
        at = whole_rows(part, rank, size)
        assert len(at) == rows // size and len(at) % multiple == 0
        ids[at], positions[at], matrix[at] = part.ids, part.positions, seen(part, columns=rows)
        targets = zip(at[part.score_rows.numpy()].tolist(), part.targets.tolist(), strict=True)
        for sequence, count in zip(scored, part.target_counts.tolist(), strict=True):
            sequence += [next(targets) for _ in range(count)]
        assert next(targets, None) is None
    assert (ids == whole.ids.numpy()).all() and (positions == whole.positions.numpy()).all()
    assert (matrix == seen(whole, columns=rows)).all()
    expected = iter(zip(whole.score_rows.tolist(), whole.targets.tolist(), strict=True))
    for sequence, count in zip(scored, whole.target_counts.tolist(), strict=True):  # every target exactly once
        assert sorted(sequence) == sorted(next(expected) for _ in range(count))


@pytest.mark.parametrize("size", [2, 4])
def test_gathered_rows_go_back_into_the_packs_order(size: int) -> None:
    whole, parts = shards(size, 1, [True, False, True, False, True])
    gathered = torch.cat([part.ids for part in parts])
    for part in parts:
        assert torch.equal(gathered[part.gathered_order], whole.ids)
    assert whole.gathered_order is None


@pytest.mark.parametrize("size", [2, 4])
def test_sharded_attention_equals_the_whole(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = shards(size, 1, [True, False, True, False, True])
    rows, heads, groups, dim = whole.ids.size(0), 4, 2, 8
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(rows, 1, n, dim, generator=generator, dtype=torch.float64) for n in (heads, groups, groups))

    for layout in (whole, *parts):
        angles = torch.outer(layout.positions.double(), torch.tensor([1.0, 0.5, 0.1, 0.01], dtype=torch.float64))
        layout.rotation = angles.cos()[:, None, None], angles.sin()[:, None, None]
    ops = ops_for(torch.float64)
    rotated = ops.rotate(k, *whole.rotation)

    def attend(layout: PackedLayout, at: np.ndarray, ranks: int) -> torch.Tensor:
        groups = SimpleNamespace(cp=SimpleNamespace(size=lambda: ranks))
        module = PackedAttention(SimpleNamespace(kv_channels=dim, ops=ops), 1, None, "self", pg_collection=groups)
        return module(q[at], k[at], v[at], None, packed_seq_params=layout)

    everything = np.concatenate([whole_rows(part, rank, size) for rank, part in enumerate(parts)])
    monkeypatch.setattr(
        layers, "gather_from_sequence_parallel_region", lambda _, group: torch.cat((rotated, v), -1)[everything]
    )
    expected = attend(whole, np.arange(rows), 1)
    assert expected.shape == (rows, 1, heads * dim)
    for rank, part in enumerate(parts):
        at = whole_rows(part, rank, size)
        torch.testing.assert_close(attend(part, at, size), expected[at], rtol=1e-12, atol=1e-12)


# Scores and gradients do not depend on the layout


PACKINGS: dict[str, list[tuple[list[int], list[bool], int]]] = {  # packs of (pairs, shared, multiple)
    "separate, shared": [([i], [True], 1) for i in range(5)],
    "packed": [([0, 1, 2, 3, 4], [False] * 5, 1)],
    "packed, shared": [([0, 1, 2, 3, 4], [True] * 5, 1)],
    "packed, some shared, padded": [([0, 1, 2, 3, 4], [True, False, True, False, True], 64)],
    "two packs in another order": [([4, 1], [True, True], 8), ([3, 0, 2], [False, True, False], 1)],
    "with an empty pack": [([], [], 4), ([0, 1, 2, 3, 4], [True] * 5, 1)],
}


def scores_and_gradients(model: Any, packs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Scores [num_pairs, 2] and the gradients of a fixed weighted sum of them."""
    pairs = make_pairs(SIZES)
    weights = torch.linspace(-1, 2, 10, dtype=torch.float64).view(-1, 2)
    dtype = next(model.parameters()).dtype
    scores = torch.zeros(5, 2, dtype=dtype)
    model.zero_grad()
    for members, shared, multiple in packs:
        layout = layout_of([pairs[i] for i in members], shared, head=model.head, multiple=multiple)
        found = model(layout.ids[None], None, None, packed_seq_params=layout).view(-1, 2)
        assert found.dtype == dtype and found.size(0) == len(members)
        (found * weights[members].to(dtype)).sum().backward()
        scores[members] = found.detach()
    return scores, {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models with tied and untied embeddings, with and without norms and biases in attention."""
    root = tmp_path_factory.mktemp("models")
    save_tiny(root / "lm", "qwen3", tie_word_embeddings=True)
    save_tiny(root / "scalar", "qwen2", head="scalar")
    return {head: root / head for head in ("lm", "scalar")}


@pytest.fixture(scope="module", params=["lm", "scalar"])
def head(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_scores_and_gradients_do_not_depend_on_the_packing(
    directories: dict[str, Path], head: str, dtype: torch.dtype, tolerance: float
) -> None:
    model = load(directories[head], head=head, dtype=dtype)
    separate = [([i], [False], 1) for i in range(5)]
    scores, grads = scores_and_gradients(model, separate)
    assert all(grad.any() for grad in grads.values())
    largest = max(float(grad.norm()) for grad in grads.values())
    for name, packs in PACKINGS.items():
        found, found_grads = scores_and_gradients(model, packs)
        torch.testing.assert_close(found, scores, rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}")
        for parameter, grad in grads.items():
            error = float((found_grads[parameter] - grad).norm()) / max(float(grad.norm()), 1e-3 * largest)
            assert error <= tolerance, (name, parameter, error)


@pytest.mark.usefixtures("on_cpu")
def test_an_empty_pack_gives_no_scores_and_zero_gradients(directories: dict[str, Path], head: str) -> None:
    model = load(directories[head], head=head)
    layout = layout_of([], head=head, multiple=4)
    scores = model(layout.ids[None], None, None, packed_seq_params=layout)
    assert scores.shape == (0,)
    scores.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


@pytest.mark.usefixtures("on_cpu")
def test_a_pairs_score_ignores_its_neighbours(directories: dict[str, Path], head: str) -> None:
    """Bit for bit: other tokens in the same places of the pack change nothing."""
    model = load(directories[head], head=head)
    pairs, others = make_pairs(SIZES), make_pairs(SIZES, seed=1)
    with torch.no_grad():
        a, b = (
            model(layout.ids[None], None, None, packed_seq_params=layout).view(-1, 2)
            for layout in (layout_of(p, True, head=head) for p in (pairs, [*others[:2], pairs[2], *others[3:]]))
        )
    assert torch.equal(a[2], b[2])
    assert not torch.equal(a[1], b[1])
