"""`relax.preprocess` and training from what it writes: the losses of the raw rows, and nothing left by what was killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from relax.data.prefix import PAIR_FIELDS, field_files, field_path, sidecar_path
from relax.preprocess import TEMPLATES
from tests.integration.command import ENVIRONMENT, Ended, Workplace, timeless, write_pairs
from tests.models import VOCABULARY

pytestmark = pytest.mark.integration


def configure(place: Workplace, *, rows: Path, name: str = "pairs") -> Path:
    """configs/NAME.yaml, which tokenizes `rows` into data/NAME."""
    config = place.path(f"configs/{name}.yaml")
    config.parent.mkdir(exist_ok=True)
    keys = {
        "input": str(rows),
        "output_prefix": f"data/{name}",
        "handler_name": "PreferencePairHandler",
        "tokenizer_name_or_path": str(place.flags["hf_checkpoint"]),
        "log_interval": 10,
    }
    config.write_text(yaml.safe_dump(keys))
    return config


def preprocess(place: Workplace, *arguments: str) -> Ended:
    return place.server.start(arguments, directory=place.directory, module="relax.preprocess").wait()


@pytest.fixture(scope="module")
def tokenized(place: Workplace, assets: Path) -> Workplace:
    """data/train and data/eval, tokenized."""
    for name in ("train", "eval"):
        ended = preprocess(place, "--config", str(configure(place, rows=assets / f"{name}.jsonl", name=name)))
        assert ended.code == 0, ended.err
    return place


def test_the_command_says_what_it_does(tokenized: Workplace, assets: Path) -> None:
    config = configure(tokenized, rows=assets / "train.jsonl", name="again")
    ended = preprocess(tokenized, "--config", str(config), "--seq-length", "99", "--output-prefix=data/other")
    assert ended.code == 0, ended.err
    assert "20 of 20 rows, " in ended.out and " rows/s\n" in ended.out
    assert "other: 20 of 20 rows kept" in ended.out and ended.out.endswith("data/other: 20 rows\n")
    sidecar = json.loads(sidecar_path(tokenized.path("data/other")).read_text())
    assert sidecar["seq_length"] == 99 and sidecar["versions"].keys() >= {"relax", "megatron-core"}
    assert preprocess(tokenized, "--config", str(config), "--map-keys", '{"promt": "x"}').error.startswith("map_keys: ")


@pytest.mark.parametrize("loss", ["dpo", "rm"])
def test_training_from_tokenized_pairs_is_training_from_their_rows(tokenized: Workplace, assets: Path, loss: str) -> None:
    place = tokenized
    limits = {"loss_type": loss, "preference_max_length": 40, "preference_max_completion_length": 10}
    raw = {"exp_name": f"raw-{loss}", "eval_prompt_data": assets / "eval.jsonl", **limits}
    place.succeed(save=f"out/{loss}", **raw)
    out = place.succeed(**{**raw, "exp_name": f"read-{loss}", "prompt_data": "data/train", "eval_prompt_data": "data/eval"})
    assert "data/train: tokenized, 20 rows" in out
    assert timeless(place.log(f"raw-{loss}")) == timeless(place.log(f"read-{loss}"))
    resumed = {"load": f"out/{loss}", "num_rollout": 7, "exp_name": f"on-{loss}"}
    assert "step 7/7" in place.succeed(**{**raw, **resumed, "prompt_data": "data/train"})  # the same data fingerprint


def test_the_template_that_rendered_tokenized_pairs_goes_into_the_export(tokenized: Workplace, assets: Path) -> None:
    config = configure(tokenized, rows=assets / "train.jsonl", name="alpaca")
    assert preprocess(tokenized, "--config", str(config), "--prompt-type", "alpaca").code == 0
    tokenized.succeed(exp_name="alpaca", prompt_data="data/alpaca", num_rollout=1, save_hf="out/alpaca")
    named = json.loads(TEMPLATES.read_text())["alpaca"]["template"]
    assert tokenized.path("out/alpaca/chat_template.jinja").read_text() == "".join(named)


def test_a_dry_run_plans_over_tokenized_pairs(tokenized: Workplace) -> None:
    assert "data/train: tokenized, 20 rows" in tokenized.succeed(prompt_data="data/train", dry_run=True)


def test_what_does_not_belong_to_the_model_is_refused(tokenized: Workplace) -> None:
    message = tokenized.refuse(prompt_data="data/train", system_prompt="Be brief")
    assert message == "data/train: already tokenized; --system-prompt would have no effect on it."
    assert tokenized.refuse(prompt_data="data/trains") == "--prompt-data data/trains does not exist"
    for field in PAIR_FIELDS:  # a foreign file with a token that the model lacks
        for file in field_files(tokenized.path("data/eval"), field):
            file.with_name(file.name.replace("eval", "foreign")).write_bytes(file.read_bytes())
    for field in ("chosen_input_ids", "chosen_labels"):
        path = Path(f"{field_path(tokenized.path('data/foreign'), field)}.bin")
        path.write_bytes(path.read_bytes()[:-8] + VOCABULARY.to_bytes(4, "little") + path.read_bytes()[-4:])
    message = tokenized.refuse(prompt_data="data/foreign")
    assert f"the data hold token id {VOCABULARY}, but the model has a vocabulary of {VOCABULARY}" in message


@pytest.mark.parametrize(("number", "workers"), [(signal.SIGTERM, 1), (signal.SIGKILL, 2)])
def test_what_is_killed_leaves_no_files_and_no_processes(fresh_place: Workplace, number: signal.Signals, workers: int) -> None:
    place = fresh_place
    config = configure(place, rows=write_pairs(place.path("many.jsonl"), 6000))
    started = subprocess.Popen(
        [sys.executable, "-m", "relax.preprocess", "--config", str(config), "--workers", str(workers)],
        cwd=place.directory,
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None and " rows/s" in started.stdout.readline()
    assert len(processes_in(place.directory)) >= workers
    for _ in range(20):  # the first one counts; the others would interrupt the clearing away
        started.send_signal(number)
        time.sleep(0.002)
    assert started.wait() == (128 + number if number == signal.SIGTERM else -number)
    deadline = time.monotonic() + 60
    while processes_in(place.directory) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_in(place.directory) == []
    left = [path.name for path in place.path("data").iterdir()]
    assert not any(name.startswith("pairs") for name in left) and len(left) == (number == signal.SIGKILL)
    write_pairs(place.path("many.jsonl"), 5)
    assert preprocess(place, "--config", str(config)).code == 0
    assert {path.name[:12] for path in place.path("data").iterdir()} == {"pairs_packed"}


def processes_in(directory: Path) -> list[str]:
    """Process ids whose working directory this is."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and (entry / "cwd").resolve() == directory and (entry / "cmdline").read_bytes():
                found.append(entry.name)
        except OSError:
            continue
    return found
