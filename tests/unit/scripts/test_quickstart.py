"""The quickstart and the environment that it stands on, with a stub for every Python process."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# Records each call and leaves behind what the real one would.
STUB = r"""#!/usr/bin/env bash
if [[ $1 == -c ]]; then echo 0; exit; fi
echo "$*" >>calls
case "$*" in
*prepare_smollm2.py*) mkdir -p "$3"; echo '{}' >"$3/config.json" ;;
*prepare_demo_pairs.py*) mkdir -p "$3"; touch "$3"/demo_{train,eval}.jsonl ;;
"-m relax.train"*)
    mkdir -p quickstart/checkpoints/quickstart log/quickstart
    echo "${STEPS:-24}" >quickstart/checkpoints/quickstart/latest_checkpointed_iteration.txt
    [[ -n ${STEPS:-} ]] || touch log/quickstart/curves.png
    exit "${CODE:-0}" ;;
esac
"""


class Project:
    """A copy of the scripts beside a `.venv` of stubs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        shutil.copytree(ROOT / "scripts", directory / "scripts")
        for name in ("pyproject.toml", "constraints.txt"):
            (directory / name).write_text(name)
        for name in ("python", "pip"):
            stub = directory / ".venv" / "bin" / name
            stub.parent.mkdir(parents=True, exist_ok=True)
            stub.write_text(STUB)
            stub.chmod(0o755)

    def quickstart(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(self.directory / "scripts" / "quickstart.sh"), *arguments],
            cwd=self.directory.parent,
            env={"PATH": os.environ["PATH"], **variables},
            capture_output=True,
            text=True,
            timeout=60,
        )

    def calls(self) -> list[str]:
        """The Python calls since last asked."""
        calls = self.directory / "calls"
        lines = calls.read_text().splitlines()
        calls.write_text("")
        return lines


@pytest.fixture
def project(tmp_path: Path) -> Project:
    directory = tmp_path / "project"
    directory.mkdir()
    return Project(directory)


INSTALL = "-m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .[quickstart]"


def test_first_run_installs_fetches_and_trains(project: Project):
    done = project.quickstart("--seed", "7")
    assert done.returncode == 0, done.stderr
    install, model, pairs, train = project.calls()
    assert install == INSTALL
    assert model == "scripts/data/prepare_smollm2.py --output-dir quickstart/SmolLM2-135M-Instruct"
    assert pairs == "scripts/data/prepare_demo_pairs.py --output-dir quickstart"
    assert train.startswith("-m relax.train --hf-checkpoint quickstart/SmolLM2-135M-Instruct")
    for words in (
        "--load quickstart/checkpoints/quickstart --save quickstart/checkpoints/quickstart",
        "--loss-type dpo",
        "--prompt-data quickstart/demo_train.jsonl",
        "--no-bf16",
        "--eval-prompt-data quickstart/demo_eval.jsonl",
        "--num-rollout 24 --global-batch-size 3 --max-tokens-per-gpu 4096 --lr 1e-5",
        "--save-interval 12",
        "--device cpu",
    ):
        assert words in train
    stages = [line.partition(": ")[0] for line in done.stdout.splitlines() if ": " in line]
    assert stages[:4] == ["environment", "model", "pairs", "training"]
    assert "training: DPO, 24 steps of 3 pairs on the CPU\n" in done.stdout
    assert "--exp-name quickstart " in train and train.endswith(" --seed 7")
    assert "Curves: log/quickstart/curves.png" in done.stdout


def test_second_run_says_that_it_is_done(project: Project):
    project.quickstart()
    project.calls()
    done = project.quickstart()
    assert done.returncode == 0 and "Done already" in done.stdout
    assert project.calls() == ["-m relax.report log/quickstart.jsonl"]


def test_a_stopped_run_resumes_and_keeps_its_exit_code(project: Project):
    stopped = project.quickstart(STEPS="12", CODE="143")
    assert stopped.returncode == 143 and "Curves" not in stopped.stdout
    project.calls()
    assert project.quickstart().returncode == 0
    (train,) = project.calls()
    assert train.startswith("-m relax.train")


def test_more_steps_go_on_from_a_finished_run(project: Project):
    project.quickstart()
    project.calls()
    project.quickstart(NUM_ROLLOUT="48")
    (train,) = project.calls()
    assert "--num-rollout 48" in train


@pytest.mark.parametrize("held", ["x[$(touch ran)0]", "trained[$(touch ran)]", "", "release", "08", "12\n13"])
def test_a_tracker_is_never_run(project: Project, held: str):
    project.quickstart()
    project.calls()
    tracker = project.directory / "quickstart/checkpoints/quickstart/latest_checkpointed_iteration.txt"
    tracker.write_text(held)
    done = project.quickstart()
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert f"{tracker.relative_to(project.directory)} must hold a step, not " in done.stderr
    assert project.calls() == [] and not list(project.directory.parent.rglob("ran"))


@pytest.mark.parametrize("variable", ["NUM_ROLLOUT", "NUM_GPUS", "NNODES", "GLOBAL_BATCH_SIZE"])
def test_a_number_from_the_environment_is_never_run(project: Project, variable: str):
    project.quickstart()
    project.calls()
    done = project.quickstart(**{variable: "x[$(touch ran)0]"})
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert f"{variable}=" in done.stderr
    assert project.calls() == [] and not list(project.directory.parent.rglob("ran"))


def test_own_model_and_pairs_are_used_instead(project: Project):
    own = project.directory / "own"
    own.mkdir()
    (own / "config.json").write_text("{}")
    (own / "pairs.jsonl").touch()
    done = project.quickstart(HF_CHECKPOINT="own", PROMPT_DATA="own/pairs.jsonl", NUM_GPUS="1", GLOBAL_BATCH_SIZE="5")
    assert done.returncode == 0, done.stderr
    install, train = project.calls()
    assert install == INSTALL and "--eval-prompt-data" not in train and "--no-bf16" not in train
    assert "--hf-checkpoint own" in train and "--prompt-data own/pairs.jsonl" in train
    assert "--device cuda" in train and "--global-batch-size 5" in train


def test_changed_pins_install_again(project: Project):
    project.quickstart()
    project.calls()
    (project.directory / "constraints.txt").write_text("other pins")
    project.quickstart()
    assert project.calls()[0] == INSTALL


def test_an_old_python_is_refused(project: Project):
    shutil.rmtree(project.directory / ".venv")
    old = project.directory / "old-python"
    old.write_text("#!/usr/bin/env bash\nexit 1\n")
    old.chmod(0o755)
    done = project.quickstart(PYTHON=str(old))
    assert done.returncode == 2 and "relax needs Python 3.11 or newer" in done.stderr
    assert not (project.directory / ".venv").exists()
