"""Checksums beside files: the published digest, in the lines of `xxh128sum`."""

from pathlib import Path

from relax.data.checksums import CHECKSUMS, damage, file_checksum, write_checksums

EMPTY = "99aa06d3014798d86001c324468d497f"  # XXH3-128 of nothing, from the reference implementation's tests


def test_the_lines_are_those_of_xxh128sum(tmp_path: Path):
    (tmp_path / "b c").write_bytes(b"")
    (tmp_path / "a").write_bytes(b"x" * 1_000_000)
    write_checksums(tmp_path)
    assert (tmp_path / CHECKSUMS).read_text() == f"{file_checksum(tmp_path / 'a')}  a\n{EMPTY}  b c\n"
    assert damage(tmp_path) is None


def test_every_byte_counts(tmp_path: Path):
    file = tmp_path / "a"
    content = bytes(range(256)) * 3
    file.write_bytes(content)
    write_checksums(tmp_path)
    for i in range(0, len(content), 7):
        file.write_bytes(content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :])
        assert damage(tmp_path) == "a is not as it was written"
    file.write_bytes(content)
    assert damage(tmp_path) is None
