"""The reference table: a row is right or missing, on disk as in memory."""

import json
from pathlib import Path

import numpy as np
import pytest

from relax.errors import UserError
from relax.reference import table as reference
from relax.reference.table import ReferenceTable, row_dtype, table_path

SCORES = np.array([[-1.5, -2.25], [-3.0, -4.0], [-5.125, -0.5], [0.0, -7.0]], dtype=np.float32)


def hashes(count: int = 4, *, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 16), dtype=np.uint8)


def at(*indices: int) -> np.ndarray:
    return np.array(indices)


def filled(path: Path, indices: np.ndarray | None = None) -> ReferenceTable:
    table = ReferenceTable(hashes(), width=2, path=path)
    indices = np.arange(4) if indices is None else indices
    table.put(indices, SCORES[indices])
    return table


def missing(table: ReferenceTable) -> list[int]:
    return table.missing(np.arange(len(table.values))).tolist()


def test_rows_come_back_in_the_order_asked_for(tmp_path: Path) -> None:
    table = filled(tmp_path / "t")
    assert (table.take(at(2, 0, 2)) == SCORES[[2, 0, 2]]).all()
    assert table.take(at(2)).dtype == np.float32


def test_an_absent_row_is_an_error_and_not_a_number(tmp_path: Path) -> None:
    table = filled(tmp_path / "t", at(0, 3))
    assert missing(table) == [1, 2]
    assert table.missing(at(2, 0, 1)).tolist() == [2, 1]
    with pytest.raises(KeyError, match="group 2 were never computed"):
        table.take(at(0, 2))


def test_an_interrupted_pass_continues(tmp_path: Path) -> None:
    """Rows are on disk once `put` returns; another process sees them and adds the rest."""
    first = filled(tmp_path / "t", at(0, 3))
    second = ReferenceTable(hashes(), width=2, path=tmp_path / "t")
    assert missing(second) == [1, 2]
    assert (second.take(at(3, 0)) == SCORES[[3, 0]]).all()
    second.put(at(1, 2), SCORES[[1, 2]])
    del first
    third = ReferenceTable(hashes(), width=2, path=tmp_path / "t")
    assert missing(third) == []
    assert (third.take(np.arange(4)) == SCORES).all()


def test_a_row_of_another_pair_is_never_read(tmp_path: Path) -> None:
    filled(tmp_path / "t")
    changed = hashes()
    changed[1, 15] ^= 1
    assert missing(ReferenceTable(changed, width=2, path=tmp_path / "t")) == [1]
    moved = hashes()[[1, 0, 2, 3]]
    assert missing(ReferenceTable(moved, width=2, path=tmp_path / "t")) == [0, 1]
    assert missing(ReferenceTable(hashes(seed=1), width=2, path=tmp_path / "t")) == [0, 1, 2, 3]


@pytest.mark.parametrize("offset", [0, 8, 15, 16, 19, 20, 23])
def test_a_torn_row_is_computed_again(tmp_path: Path, offset: int) -> None:
    """One flipped byte anywhere in the row, check or scores."""
    filled(tmp_path / "t")
    content = bytearray((tmp_path / "t").read_bytes())
    assert len(content) == 4 * row_dtype(2).itemsize == 4 * 24
    content[2 * row_dtype(2).itemsize + offset] ^= 4
    (tmp_path / "t").write_bytes(content)
    table = ReferenceTable(hashes(), width=2, path=tmp_path / "t")
    assert missing(table) == [2] and table.damaged == 1
    assert ReferenceTable(hashes(), width=2, path=tmp_path / "t").damaged == 0, "told once, and absent from then on"
    table.put(at(2), SCORES[[2]])
    assert (ReferenceTable(hashes(), width=2, path=tmp_path / "t").take(np.arange(4)) == SCORES).all()


def test_a_sealed_table_is_read_without_a_look_at_each_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path / "t", at(0, 2, 3)).seal()
    monkeypatch.setattr(reference, "_check", None)
    table = ReferenceTable(hashes(), width=2, path=tmp_path / "t")
    assert missing(table) == [1] and table.damaged == 0
    assert (table.take(at(3, 0, 2)) == SCORES[[3, 0, 2]]).all()
    table.seal()  # nothing to do


@pytest.mark.parametrize("offset", [0, 15, 16, 23])
def test_a_seal_covers_every_bit(tmp_path: Path, offset: int) -> None:
    filled(tmp_path / "t").seal()
    content = bytearray((tmp_path / "t").read_bytes())
    content[2 * row_dtype(2).itemsize + offset] ^= 4
    (tmp_path / "t").write_bytes(content)
    table = ReferenceTable(hashes(), width=2, path=tmp_path / "t")
    assert (missing(table), table.damaged) == ([2], 1)
    table.seal()  # a pass that did not need the row
    assert missing(ReferenceTable(hashes(), width=2, path=tmp_path / "t")) == [2]


def test_a_seal_holds_for_these_pairs_alone(tmp_path: Path) -> None:
    filled(tmp_path / "t").seal()
    assert missing(ReferenceTable(hashes(seed=1), width=2, path=tmp_path / "t")) == [0, 1, 2, 3]


@pytest.mark.parametrize("seal", [b"", b"\xff\0", b"0" * 32])
def test_a_broken_seal_costs_a_look_at_each_row(tmp_path: Path, seal: bytes) -> None:
    filled(tmp_path / "t").seal()
    (tmp_path / "t.xxh128").write_bytes(seal)
    assert (ReferenceTable(hashes(), width=2, path=tmp_path / "t").take(np.arange(4)) == SCORES).all()


def test_rows_put_after_a_seal_count(tmp_path: Path) -> None:
    table = filled(tmp_path / "t", at(0))
    table.seal()
    table.put(at(1), SCORES[[1]])
    assert missing(ReferenceTable(hashes(), width=2, path=tmp_path / "t")) == [2, 3]


@pytest.mark.parametrize("name", ["t", "t.xxh128"])
def test_a_link_in_the_tables_place_is_refused(tmp_path: Path, name: str) -> None:
    """Opened, it would have been cut to the table's size."""
    (tmp_path / "precious").write_text("mine")
    (tmp_path / name).symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match=f"{name} is a symbolic link, and a cache holds files: remove it"):
        ReferenceTable(hashes(), width=2, path=tmp_path / "t")
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.parametrize("kept", [0, 1, 24, 60])
def test_a_file_cut_short_loses_its_last_rows_only(tmp_path: Path, kept: int) -> None:
    filled(tmp_path / "t")
    (tmp_path / "t").write_bytes((tmp_path / "t").read_bytes()[:kept])
    whole = kept // 24
    table = ReferenceTable(hashes(), width=2, path=tmp_path / "t")
    assert missing(table) == list(range(whole, 4))
    assert (tmp_path / "t").stat().st_size == 4 * 24


def test_a_row_of_zeros_is_a_row(tmp_path: Path) -> None:
    table = ReferenceTable(hashes(), width=2, path=tmp_path / "t")
    table.put(at(1), np.zeros((1, 2)))
    assert missing(ReferenceTable(hashes(), width=2, path=tmp_path / "t")) == [0, 2, 3]


def test_scores_are_rounded_once(tmp_path: Path) -> None:
    """In memory, on disk and for a process that reads them later: the same fp32."""
    table = ReferenceTable(hashes(), width=2, path=tmp_path / "t")
    table.put(at(0), np.array([[-0.1, -1 / 3]], dtype=np.float64))
    expected = np.array([[-0.1, -1 / 3]]).astype(np.float32)
    assert (table.take(at(0)) == expected).all()
    assert (ReferenceTable(hashes(), width=2, path=tmp_path / "t").take(at(0)) == expected).all()


def test_a_rank_without_a_file_takes_the_values_it_is_sent(tmp_path: Path) -> None:
    """The broadcast: rank 0 reads the file, the others get its rows and fill in the same gaps."""
    main = filled(tmp_path / "t", at(0, 3))
    other = ReferenceTable(hashes(), width=2, path=None)
    assert missing(other) == [0, 1, 2, 3]
    other.values = main.values.copy()
    assert missing(other) == missing(main) == [1, 2]
    other.put(at(1, 2), SCORES[[1, 2]])
    assert (other.take(np.arange(4)) == SCORES).all()
    assert [path.name for path in tmp_path.iterdir()] == ["t"]
    assert missing(ReferenceTable(hashes(), width=2, path=tmp_path / "t")) == [1, 2]


# Which file


IDENTITY = {"reference_sha256": "ab", "data_fingerprint": "cd", "dtype": "bfloat16", "world_size": 2, "order": 42}


@pytest.mark.parametrize("change", [{name: "other"} for name in IDENTITY] + [{"new": 1}])
def test_another_identity_is_another_file(tmp_path: Path, change: dict[str, object]) -> None:
    path = table_path(tmp_path, IDENTITY)
    assert table_path(tmp_path, {**IDENTITY, **change}) != path
    assert table_path(tmp_path, dict(reversed(IDENTITY.items()))) == path


def test_the_identity_lies_beside_the_table(tmp_path: Path) -> None:
    path = table_path(tmp_path / "new" / "cache", IDENTITY)
    assert path.parent == tmp_path / "new" / "cache" and path.suffix == ".table"
    filled(path)
    assert sorted(p.name for p in path.parent.iterdir()) == [f"{path.stem}.json", path.name]
    assert json.loads(path.with_suffix(".json").read_text()) == IDENTITY
