"""The shell scripts, run with a stub `python` that records how the trainer would have started."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPTS = sorted([*(ROOT / "scripts").rglob("*.sh"), ROOT / ".ci" / "run"])
RUN_SCRIPTS = {
    "dpo": ROOT / "scripts/training/dpo/run-qwen3-0.6B-ultrafeedback-1xgpu.sh",
    "rm": ROOT / "scripts/training/reward_modeling/run-qwen3-0.6B-ultrafeedback-1xgpu.sh",
}
# Stands in for python: records its arguments, one a line, unless asked whether torch is there, and does as $STUB says.
STUB = r"""#!/usr/bin/env bash
[[ $1 != -c ]] || exit 0
printf '%s\n' "$@" >arguments
eval "${STUB:-}"
"""
WAIT_FOR_SIGNAL = r"""
stop() { echo "saving after $1"; exit "$2"; }
trap 'stop TERM 143' TERM; trap 'stop INT 130' INT; trap 'stop USR1 138' USR1
echo ready; touch ready
for _ in {1..300}; do sleep 0.1; done
"""


def heed_signals() -> None:
    """A shell cannot trap what its parent ignores, as nohup and background jobs do."""
    for kind in (signal.SIGINT, signal.SIGHUP):
        signal.signal(kind, signal.SIG_DFL)


class Stage:
    """A directory with inputs, a stub on PATH, and only the variables that a test sets."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        stub = directory / "bin" / "python"
        stub.parent.mkdir()
        stub.write_text(STUB)
        stub.chmod(0o755)
        (directory / "model").mkdir()
        (directory / "model" / "config.json").write_text("{}")
        for name in ("train.jsonl", "eval.jsonl"):
            (directory / name).touch()
        self.inputs = {"HF_CHECKPOINT": "model", "PROMPT_DATA": "train.jsonl", "EVAL_PROMPT_DATA": "eval.jsonl"}

    def environment(self, variables: dict[str, str]) -> dict[str, str]:
        return {"PATH": f"{self.directory / 'bin'}:{os.environ['PATH']}", "HOME": str(self.directory), **variables}

    def run(self, script: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(script), *arguments],
            cwd=self.directory,
            env=self.environment(variables),
            capture_output=True,
            text=True,
            timeout=60,
        )

    def start(self, script: Path, **variables: str) -> subprocess.Popen[str]:
        command = ["bash", str(script)]
        environment = self.environment(variables)
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command,
            cwd=self.directory,
            env=environment,
            stdout=pipe,
            stderr=pipe,
            text=True,
            start_new_session=True,
            preexec_fn=heed_signals,
        )

    def started(self) -> list[str]:
        """Arguments of the recorded start."""
        return (self.directory / "arguments").read_text().splitlines()

    def flags(self) -> dict[str, str]:
        """The trainer's flags and values."""
        arguments = self.started()
        flags = arguments[arguments.index("relax.train") + 1 :]
        heads = [index for index, word in enumerate(flags) if word.startswith("--")] + [len(flags)]
        return {flags[a]: " ".join(flags[a + 1 : b]) for a, b in zip(heads, heads[1:], strict=False)}

    def log(self) -> str:
        (log,) = (self.directory / "log").glob("*.log")
        return log.read_text()


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_script_parses(script: Path):
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.parametrize(("loss", "lr"), [("dpo", "5e-7"), ("rm", "1e-5")])
def test_defaults_are_the_contracts(stage: Stage, loss: str, lr: str):
    done = stage.run(RUN_SCRIPTS[loss], **stage.inputs)
    assert done.returncode == 0, done.stderr
    name = f"qwen3-0.6B-ultrafeedback-{loss}"
    assert stage.started()[:2] == ["-m", "relax.train"], "one process needs no torchrun"
    assert stage.flags() == {
        "--hf-checkpoint": "model",
        "--load": f"checkpoints/{name}",
        "--save": f"checkpoints/{name}",
        "--save-interval": "50",
        "--loss-type": loss,
        **({"--dpo-beta": "0.1"} if loss == "dpo" else {}),
        "--prompt-data": "train.jsonl",
        "--preference-max-length": "1024",
        "--preference-max-completion-length": "512",
        "--eval-prompt-data": "eval.jsonl",
        "--eval-interval": "200",
        "--num-rollout": "200",
        "--global-batch-size": "32",
        "--max-tokens-per-gpu": "8192",
        "--bf16": "",
        "--lr": lr,
        "--min-lr": "0",
        "--lr-decay-style": "cosine",
        "--weight-decay": "0",
        "--adam-beta1": "0.9",
        "--adam-beta2": "0.999",
        "--clip-grad": "1.0",
        "--device": "cuda",
        "--exp-name": name,
    }


def test_the_large_models_recipe_is_the_published_one(stage: Stage):
    script = ROOT / "scripts/training/dpo/run-qwen3-30B-A3B-orca-16xgpu.sh"
    done = stage.run(script, **stage.inputs, NNODES="2", NODE_RANK="0", MASTER_ADDR="first")
    assert done.returncode == 0, done.stderr
    assert stage.started()[2:6] == ["--nnodes", "2", "--nproc-per-node", "8"]
    recipe = {
        "--global-batch-size": "64",
        "--preference-max-length": "4096",
        "--lr": "5e-8",
        "--lr-decay-style": "constant",
        "--weight-decay": "0",
        "--clip-grad": "1.0",
        "--adam-beta1": "0.9",
        "--adam-beta2": "0.999",
        "--num-rollout": "1000",
        "--bf16": "",
        "--use-distributed-optimizer": "",
        "--sequence-parallel": "",
        "--moe-aux-loss-coeff": "0.001",
        "--device": "cuda",
    }
    assert recipe.items() <= stage.flags().items()
    done = stage.run(script, "--dry-run", "--world-size", "16", **stage.inputs)
    assert done.returncode == 0 and stage.started()[:2] == ["-m", "relax.train"]  # one process plans for all


@pytest.mark.parametrize("loss", RUN_SCRIPTS)
def test_variables_override_the_defaults(stage: Stage, loss: str):
    variables = {
        "NUM_ROLLOUT": ("--num-rollout", "3"),
        "GLOBAL_BATCH_SIZE": ("--global-batch-size", "4"),
        "MAX_TOKENS_PER_GPU": ("--max-tokens-per-gpu", "512"),
        "LR": ("--lr", "2e-4"),
        "SAVE_INTERVAL": ("--save-interval", "2"),
        "EVAL_INTERVAL": ("--eval-interval", "1"),
        "EXP_NAME": ("--exp-name", "mine"),
    }
    values = {variable: value for variable, (_, value) in variables.items()}
    done = stage.run(RUN_SCRIPTS[loss], **stage.inputs, **values, SAVE_DIR="my saves", NUM_GPUS="0")
    assert done.returncode == 0, done.stderr
    flags = stage.flags()
    assert {flag: flags[flag] for flag, _ in variables.values()} == dict(variables.values())
    assert flags["--save"] == flags["--load"] == "my saves/mine" and flags["--device"] == "cpu"


@pytest.mark.parametrize("loss", RUN_SCRIPTS)
def test_arguments_pass_through_as_they_are(stage: Stage, loss: str):
    extra = ["--system-prompt", "Be  brief, *please*", "--no-shuffle"]
    assert stage.run(RUN_SCRIPTS[loss], *extra, **stage.inputs).returncode == 0
    assert stage.started()[-3:] == extra


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        ({"NUM_GPUS": "4"}, ["--nnodes", "1", "--nproc-per-node", "4", "--standalone"]),
        (
            {"NUM_GPUS": "8", "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "first", "MASTER_PORT": "1234"},
            ["--nnodes", "2", "--nproc-per-node", "8"]
            + ["--node-rank", "1", "--master-addr", "first", "--master-port", "1234"],
        ),
        (
            {"NUM_GPUS": "0", "NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "first"},
            ["--nnodes", "2", "--nproc-per-node", "1"]
            + ["--node-rank", "0", "--master-addr", "first", "--master-port", "29500"],
        ),
    ],
)
def test_several_processes_start_under_torchrun(stage: Stage, variables: dict[str, str], launcher: list[str]):
    done = stage.run(RUN_SCRIPTS["dpo"], **stage.inputs, **variables)
    assert done.returncode == 0, done.stderr
    signals = ["--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1", "--shutdown-timeout", "120"]
    expected = ["-m", "relax.launch", *launcher[:4], *signals, *launcher[4:], "-m", "relax.train"]
    assert stage.started()[: len(expected)] == expected


@pytest.mark.parametrize("code", [0, 1, 2, 137])
def test_exit_code_and_output_are_kept(stage: Stage, code: int):
    stub = f"echo to stdout; echo to stderr >&2; exit {code}"
    done = stage.run(RUN_SCRIPTS["rm"], **stage.inputs, STUB=stub, EXP_NAME="mine")
    assert done.returncode == code
    (log,) = (stage.directory / "log").iterdir()
    assert log.name.startswith("mine-") and done.stdout == log.read_text()
    assert log.read_text().splitlines() == [f"Logging to log/{log.name}", "to stdout", "to stderr"]


@pytest.mark.parametrize(
    ("sent", "received", "code"),
    [("SIGTERM", "TERM", 143), ("SIGINT", "INT", 130), ("SIGUSR1", "USR1", 138), ("SIGHUP", "TERM", 143)],
)
@pytest.mark.parametrize("to_group", [False, True])
def test_signals_reach_the_trainer_once(stage: Stage, sent: str, received: str, code: int, to_group: bool):
    """Sent to the script alone, or to everything in its terminal's foreground group, as Ctrl-C does."""
    process = stage.start(RUN_SCRIPTS["dpo"], **stage.inputs, STUB=WAIT_FOR_SIGNAL)
    try:
        deadline = time.monotonic() + 30
        while not (stage.directory / "ready").exists():
            assert time.monotonic() < deadline, process.poll()
            time.sleep(0.02)
        (os.killpg if to_group else os.kill)(process.pid, getattr(signal, sent))
        process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == code
    assert stage.log().splitlines()[1:] == ["ready", f"saving after {received}"]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"HF_CHECKPOINT": ""}, "hf download Qwen/Qwen3-0.6B --revision c1899de289a04d12100db370d81485cdf75e47ca"),
        ({"HF_CHECKPOINT": "nowhere"}, "HF_CHECKPOINT=nowhere has no config.json"),
        ({"PROMPT_DATA": ""}, "no pairs at data/ultrafeedback/ultrafeedback_train.jsonl: set PROMPT_DATA"),
        ({"PROMPT_DATA": "nothing"}, "prepare_ultrafeedback_preferences.py --output-dir data/ultrafeedback"),
        ({"EVAL_PROMPT_DATA": "nothing"}, "no pairs at nothing"),
        ({"NUM_GPUS": "two"}, "NUM_GPUS='two' must be a whole number, at least 0"),
        ({"NNODES": "0"}, "NNODES='0' must be a whole number, at least 1"),
        ({"NNODES": "2", "NODE_RANK": "1"}, "NNODES=2 needs NODE_RANK and MASTER_ADDR"),
    ],
)
def test_what_is_missing_is_said(stage: Stage, variables: dict[str, str], message: str):
    done = stage.run(RUN_SCRIPTS["dpo"], **{**stage.inputs, **variables})
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (stage.directory / "arguments").exists()


NUMBERS = [
    "NUM_GPUS", "NNODES", "NODE_RANK", "MASTER_PORT", "NUM_ROLLOUT", "GLOBAL_BATCH_SIZE", "MAX_TOKENS_PER_GPU", "SAVE_INTERVAL",
    "EVAL_INTERVAL",
]  # fmt: skip


@pytest.mark.parametrize("value", ["x[$(touch ran)0]", "1+x[`touch ran`]", "08", "-1", "1 2", "1\n2", "99999999999999999999"])
@pytest.mark.parametrize("variable", NUMBERS)
def test_a_number_is_never_run(stage: Stage, variable: str, value: str):
    """Bash's arithmetic would evaluate the variable's text."""
    nodes = {"NUM_GPUS": "1", "NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "first"}
    for script in RUN_SCRIPTS.values():
        done = stage.run(script, **{**stage.inputs, **nodes, variable: value})
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
        assert f"{variable}=" in done.stderr and "must be a whole number, at least " in done.stderr
    assert not (stage.directory / "ran").exists() and not (stage.directory / "arguments").exists()


SLURM = {"SLURM_JOB_ID": "12345", "SLURM_JOB_NODELIST": "node", "SLURM_JOB_NUM_NODES": "1", "SLURM_GPUS_ON_NODE": "0"}
SRUN = """#!/usr/bin/env bash
while [[ $1 != bash ]]; do shift; done
export SLURM_NODEID=${NODE:-0}
exec "$@"
"""


def slurm(stage: Stage, **variables: str) -> subprocess.CompletedProcess[str]:
    """A run script under the Slurm entry point, its tasks started by a stand-in for srun."""
    for name, text in (("scontrol", "#!/bin/sh\necho node\n"), ("srun", SRUN)):
        program = stage.directory / "bin" / name
        program.write_text(text)
        program.chmod(0o755)
    return stage.run(ROOT / "scripts/entrypoint/slurm.sh", str(RUN_SCRIPTS["dpo"]), **{**stage.inputs, **SLURM, **variables})


@pytest.mark.parametrize(("job", "port"), [("12345", "22345"), ("7", "20007"), ("120000", "20000")])
def test_slurm_jobs_have_ports_of_their_own(stage: Stage, job: str, port: str):
    done = slurm(stage, SLURM_JOB_ID=job, SLURM_JOB_NUM_NODES="2")
    assert done.returncode == 0, done.stderr
    assert stage.started()[stage.started().index("--master-port") + 1] == port


@pytest.mark.parametrize("variable", ["SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_GPUS_ON_NODE", "NODE"])
def test_slurms_numbers_are_never_run(stage: Stage, variable: str):
    done = slurm(stage, **{variable: "x[$(touch ran)0]"})
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "must be a whole number" in done.stderr
    assert not (stage.directory / "ran").exists() and not (stage.directory / "arguments").exists()


@pytest.mark.parametrize("place", ["hub", "by name", "itself"])
def test_model_is_found_in_model_dir(stage: Stage, place: str):
    snapshot = "models--Qwen--Qwen3-0.6B/snapshots/abc"
    directory = {"hub": f"zoo/{snapshot}", "by name": "zoo/Qwen3-0.6B", "itself": "zoo"}[place]
    shutil.copytree(stage.directory / "model", stage.directory / directory)
    inputs = {"PROMPT_DATA": "train.jsonl", "MODEL_DIR": "zoo", "MODEL_REVISION": "abc"}
    done = stage.run(RUN_SCRIPTS["dpo"], **inputs)
    assert done.returncode == 0, done.stderr
    assert stage.flags()["--hf-checkpoint"] == directory


def test_a_tokenized_prefix_serves_as_pairs(stage: Stage):
    (stage.directory / "orca_packed_chosen_input_ids_document.idx").touch()
    done = stage.run(RUN_SCRIPTS["dpo"], HF_CHECKPOINT="model", PROMPT_DATA="orca")
    assert done.returncode == 0, done.stderr


def test_preprocessing_takes_a_name_and_flags(stage: Stage):
    script = ROOT / "scripts/data/preprocess_data.sh"
    assert stage.run(script, "orca_rlhf", "--workers", "2").returncode == 0
    config = str(ROOT / "configs/datasets/orca_rlhf.yaml")
    assert (stage.directory / "arguments").read_text().splitlines() == [
        "-m", "relax.preprocess", "--config", config, "--workers", "2"
    ]  # fmt: skip
    for arguments in ((), ("none",)):
        done = stage.run(script, *arguments)
        assert done.returncode == 2 and "NAME one of: alpaca_instruction orca_rlhf sharegpt_pairs ultrafeedback" in done.stderr


@pytest.mark.parametrize("evaluation", [{}, {"EVAL_PROMPT_DATA": ""}])
def test_own_pairs_without_evaluation_pairs(stage: Stage, evaluation: dict[str, str]):
    inputs = {"HF_CHECKPOINT": "model", "PROMPT_DATA": "train.jsonl", **evaluation}
    assert stage.run(RUN_SCRIPTS["rm"], **inputs).returncode == 0
    assert not {"--eval-prompt-data", "--eval-interval"} & stage.flags().keys()
