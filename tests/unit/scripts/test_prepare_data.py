"""The quickstart's model and pairs, from small archives of the real ones' shape."""

import hashlib
import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

import package_archive
import prepare_demo_pairs
import prepare_smollm2
from relax.errors import UserError


def pair(opening: str, *, system: str | None = None) -> dict[str, Any]:
    turns = [{"from": "human", "value": opening}, {"from": "gpt", "value": "So?"}, {"from": "human", "value": "Go on"}]
    return {
        "conversations": ([{"from": "system", "value": system}] if system else []) + turns,
        "chosen": {"from": "gpt", "value": f"good {opening}"},
        "rejected": {"from": "gpt", "value": f"bad {opening}"},
    }


def archive(directory: Path, pairs: list[dict[str, Any]]) -> Path:
    path = directory / "source.tar.gz"
    content = json.dumps(pairs).encode()
    with tarfile.open(path, "w:gz") as tar:
        member = tarfile.TarInfo(prepare_demo_pairs.MEMBER)
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
    return path


def test_pairs_become_rows_with_an_explicit_prompt(tmp_path: Path):
    (row,) = prepare_demo_pairs.read_archive(archive(tmp_path, [pair("Hi", system="Be kind")]))
    assert row == {
        "prompt": [
            {"role": "system", "content": "Be kind"},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "So?"},
            {"role": "user", "content": "Go on"},
        ],
        "chosen": [{"role": "assistant", "content": "good Hi"}],
        "rejected": [{"role": "assistant", "content": "bad Hi"}],
    }


def test_held_out_pairs_share_no_opening_with_training_pairs():
    rows = [prepare_demo_pairs.to_row(pair(opening)) for opening in ("a", "b", "c", "a", "d", "c")]
    training, evaluation = prepare_demo_pairs.split(rows, held_out=2)
    assert [prepare_demo_pairs.opening(row) for row in training] == ["a", "b", "a"]
    assert [prepare_demo_pairs.opening(row) for row in evaluation] == ["d", "c"]


def test_the_command_writes_both_files_the_same_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    source = archive(tmp_path, [pair(f"Frage {n}: ä") for n in range(50)])
    monkeypatch.setattr(prepare_demo_pairs, "SHA256", hashlib.sha256(source.read_bytes()).hexdigest())
    written = []
    for name in ("one", "two"):
        arguments = ["prepare_demo_pairs.py", "--output-dir", str(tmp_path / name), "--archive", str(source)]
        monkeypatch.setattr("sys.argv", arguments)
        prepare_demo_pairs.main()
        written.append([(tmp_path / name / f"demo_{split}.jsonl").read_bytes() for split in ("train", "eval")])
    assert written[0] == written[1] and [part.count(b"\n") for part in written[0]] == [6, 44]
    assert "demo_train.jsonl: 6 pairs" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["demo_eval.jsonl", "demo_train.jsonl"]


def test_the_tokenizer_splits_numbers_into_digits_again(tmp_path: Path):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(["in 2024", "2024 was"], trainers.BpeTrainer(show_progress=False))
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    assert tokenizer.encode("2024").tokens == ["2024"]
    prepare_smollm2.edit_json(path, {"pre_tokenizer": prepare_smollm2.DIGITS_THEN_BYTES})
    assert Tokenizer.from_file(str(path)).encode("was 2024").tokens == ["was", "Ġ", "2", "0", "2", "4"]


def test_editing_json_sets_and_removes_keys(tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_text('{"name": "x", "kept": null, "eps": 9.9e-06}')
    prepare_smollm2.edit_json(path, {"name": None, "eps": 1e-5})
    assert json.loads(path.read_text()) == {"kept": None, "eps": 1e-5}


def test_an_archive_that_is_not_the_one_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="no such file"):
        package_archive.verify(tmp_path / "missing", sha256="00")
    with pytest.raises(UserError, match="not the archive that this script reads"):
        package_archive.verify(archive(tmp_path, []), sha256="00")


def test_a_failed_download_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(UserError, match=r"could not download relax-none==0.1.*--archive"):
        package_archive.fetch("relax-none", version="0.1", sha256="00", source=True, directory=tmp_path / "to")


def test_a_downloaded_archive_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """pip is given a local wheel, so nothing here needs a network."""
    links, target = tmp_path / "links", tmp_path / "to"
    links.mkdir()
    wheel = links / "relax_none-0.1-py3-none-any.whl"
    make_wheel(wheel)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    good = hashlib.sha256(wheel.read_bytes()).hexdigest()
    fetched = package_archive.fetch("relax-none", version="0.1", sha256=good, source=False, directory=target)
    assert fetched == target / wheel.name
    with pytest.raises(UserError, match="expected 00"):
        package_archive.fetch("relax-none", version="0.1", sha256="00", source=False, directory=target)


def make_wheel(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("relax_none-0.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: relax-none\nVersion: 0.1\n")
        wheel.writestr("relax_none-0.1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("relax_none-0.1.dist-info/RECORD", "")
