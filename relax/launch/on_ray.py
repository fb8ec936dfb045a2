"""`python -m relax.launch.on_ray --num-workers N [--use-gpu] -m relax.train ...`: a command's ranks on a Ray cluster.

Ray Train's TorchTrainer places the workers and gives them their ranks; each starts the command in a process of its own with
torchrun's environment, since Ray runs a worker's function outside its main thread, where no signal can be heard. The ranks
meet in a store that the first worker opens, as torchrun's do in their agent's.

Invariants, as under `relax.launch`:
- The exit code is that of the rank which ended the run, and its reason is the last line.
- SIGTERM, SIGINT and SIGUSR1 to this process reach the ranks within a second: they finish their step, save and end.
- What ranks print appears here as they print it, and nothing of Ray's own.
- No rank outlives its worker, and no worker outlives the run.
- Keys reach the ranks from process to process: Ray keeps and shows a run's runtime environment, so that has paths alone.
"""

import argparse
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import ray
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchConfig, TorchTrainer

from relax.cli.command import STOPS, ignore_stops
from relax.launch.torchrun import end, precedence

PASSED_ON = ("PYTHON", "OMP_", "HF_", "WANDB_", "NCCL_", "GLOO_", "TORCH_")  # beginnings of variables that ranks get
SHOWN = ("PYTHONPATH", "GLOO_SOCKET_IFNAME")  # variables that Ray's workers need, too; whoever sees the dashboard reads them
GRACE = 3.0  # seconds that the other ranks have to end by themselves, and to say why
POLL = 0.5  # seconds


@ray.remote(num_cpus=0)
class Board:
    """What the launcher and the workers tell each other: ranks' variables, signals, what ranks print, and how they end."""

    def __init__(self) -> None:
        self._environment: dict[str, str] = {}
        self._signals: list[int] = []
        self._printed: list[tuple[bool, bytes]] = []
        self._ended: list[tuple[int, int, str]] = []

    def pass_on(self, environment: dict[str, str]) -> None:
        """Not an argument of the actor itself: those Ray keeps."""
        self._environment = environment

    def environment(self) -> dict[str, str]:
        return self._environment

    def note(self, number: int) -> None:
        self._signals.append(number)

    def write(self, is_error: bool, text: bytes) -> None:
        self._printed.append((is_error, text))

    def signals(self) -> list[int]:
        """All that came so far."""
        return self._signals

    def take(self) -> tuple[list[tuple[bool, bytes]], list[tuple[int, int, str]]]:
        """What was printed since the last call, and all ends so far as (rank, exit code, host)."""
        printed, self._printed = self._printed, []
        return printed, self._ended

    def end(self, rank: int, code: int, host: str) -> None:
        self._ended.append((rank, code, host))


def run_rank(config: dict[str, Any]) -> None:
    """On a worker: the command as this rank. Raises where it fails, whereupon Ray stops the other workers."""
    board, rank, sent = config["board"], get_context().get_world_rank(), 0
    store, port = None, [0]
    if rank == 0:
        store = dist.TCPStore(os.environ["MASTER_ADDR"], 0, is_master=True, wait_for_workers=False)
        port = [store.port]
    dist.broadcast_object_list(port, src=0)
    with tempfile.TemporaryDirectory() as directory:
        outputs = [Path(directory) / "out", Path(directory) / "err"]
        with outputs[0].open("wb") as out, outputs[1].open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, *config["command"]],
                cwd=config["directory"],
                env={
                    **os.environ,
                    **ray.get(board.environment.remote()),
                    "MASTER_PORT": str(port[0]),
                    "TORCHELASTIC_USE_AGENT_STORE": "True",
                },
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                preexec_fn=_die_with_the_worker,
            )
        readers = [path.open("rb") for path in outputs]
        code = None
        while code is None:
            time.sleep(POLL)
            code = process.poll()
            for is_error, reader in enumerate(readers):
                if text := reader.read():
                    ray.get(board.write.remote(bool(is_error), text))
            signals = ray.get(board.signals.remote())
            for number in signals[sent:]:
                process.send_signal(number)
            sent = len(signals)
    ray.get(board.end.remote(rank, code, socket.gethostname()))
    if code and code <= 128:  # where a signal stopped the run, let every rank end by itself
        time.sleep(GRACE)
        raise RuntimeError(f"rank {rank} ended with {code}")


def _die_with_the_worker() -> None:
    """In the new process: be killed with the thread that started it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main() -> None:
    """Start the workers, pass signals on and output back, and end as the run did."""
    args = _parse()
    environment = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
    shown = {name: value for name, value in environment.items() if name in SHOWN}
    ray.init(log_to_driver=False, logging_level="error", runtime_env={"env_vars": shown})
    board = Board.remote()  # type: ignore[attr-defined]  # Ray's decorator adds it
    ray.get(board.pass_on.remote(environment))
    signals: list[int] = []
    for kind in STOPS:
        signal.signal(kind, lambda number, _: signals.append(number))
    problem: list[Exception] = []
    # In a thread: Ray would take SIGINT for itself, and its waits would hold the other signals back.
    thread = threading.Thread(target=_fit, args=(args, board, problem))
    thread.start()
    while thread.is_alive():
        thread.join(POLL)
        while signals:
            ray.get(board.note.remote(signals.pop(0)))
        _relay(board)
    ended = _relay(board)
    ray.shutdown()
    ignore_stops()
    failed = [how for how in ended if how[1]]
    if failed:
        rank, code, host = min(failed, key=lambda how: precedence(how[1]))
        end(rank, code, host=host)
    if problem:
        print(f"relax: Ray ended the run: {problem[0]}", file=sys.stderr, flush=True)
        sys.exit(1)


def _relay(board: Any) -> list[tuple[int, int, str]]:
    """Print what ranks printed; how those that have ended did."""
    printed, ended = ray.get(board.take.remote())
    for is_error, text in printed:
        stream = sys.stderr if is_error else sys.stdout
        stream.buffer.write(text)
        stream.flush()
    return list(ended)


def _fit(args: argparse.Namespace, board: Any, problem: list[Exception]) -> None:
    try:
        # Ray keeps its own record of the run where every worker must see it; the trainer keeps its checkpoints itself.
        with tempfile.TemporaryDirectory(prefix=".ray-", dir=os.getcwd()) as storage:
            TorchTrainer(
                run_rank,
                train_loop_config={"board": board, "command": args.command, "directory": os.getcwd()},
                torch_config=TorchConfig(backend="gloo"),  # the workers' own; the command chooses its backend
                scaling_config=ScalingConfig(num_workers=args.num_workers, use_gpu=args.use_gpu),
                run_config=RunConfig(storage_path=storage),
            ).fit()
    except Exception as error:  # whatever it is, the run did not end well
        problem.append(error)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m relax.launch.on_ray",
        usage="%(prog)s --num-workers N [--use-gpu] -m relax.train [flags]",
        description="Run a command as N ranks on a Ray cluster.",
    )
    parser.add_argument("--num-workers", type=int, required=True, help="ranks of the run", metavar="N")
    parser.add_argument("--use-gpu", action="store_true", help="one GPU for each rank (default: a CPU)")
    own = sys.argv[1:]
    at = own.index("-m") if "-m" in own else len(own)
    args = parser.parse_args(own[:at])
    args.command = own[at:]
    if len(args.command) < 2:
        parser.error("give the command to run, as in -m relax.train --loss-type dpo")
    return args


if __name__ == "__main__":
    main()
