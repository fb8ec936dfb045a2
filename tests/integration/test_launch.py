"""`python -m relax.launch` over ranks that end in each way: the exit code and the one line that tells which rank and how."""

import signal
import socket
import time
from pathlib import Path

import pytest

from tests.integration.command import Running, Server

pytestmark = [pytest.mark.integration, pytest.mark.distributed]

# A rank that does not import torch: what it does is its code, by number.
RANK = """
import os, pathlib, signal, sys, time
rank = int(os.environ["RANK"])
pathlib.Path(f"pid{rank}").write_text(str(os.getpid()))
def wait(): time.sleep(60)
def ended(other):  # or a zombie, which its parent has not yet asked for
    while not (pid := pathlib.Path(f"pid{other}").read_text() if pathlib.Path(f"pid{other}").exists() else ""): time.sleep(0.01)
    try:
        while ") Z" not in pathlib.Path(f"/proc/{pid}/stat").read_text(): time.sleep(0.01)
    except OSError:
        pass
def stop(number, frame): sys.stdout.write(f"rank {rank} saves\\n"); sys.exit(128 + number)
%s
"""


def start(server: Server, directory: Path, code: str) -> Running:
    (directory / "rank.py").write_text(RANK % code)
    signals = ["--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1"]
    arguments = ["--standalone", "--nproc-per-node", "2", *signals, "rank.py"]
    return server.start(arguments, directory=directory, module="relax.launch")


@pytest.mark.parametrize(
    ("code", "expected", "lines"),
    [
        ("print('done') if rank == 0 else None", 0, []),
        (
            "if rank == 0: print('relax: error: no data', file=sys.stderr)\nelse: time.sleep(5)\nsys.exit(2)",
            2,
            ["relax: error: no data"],
        ),
        (
            "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\nwait()",
            137,
            ["relax: rank 1 on HOST was killed by signal 9 (SIGKILL), as by a machine that runs out of memory"],
        ),
        ("if rank == 1: sys.exit('a defect')\nwait()", 1, ["a defect", "relax: rank 1 on HOST ended with exit code 1"]),
        (
            "if rank == 1: sys.exit(1)\nended(1)\nsys.exit(3)",
            1,
            ["relax: rank 1 on HOST ended with exit code 1"],
        ),  # 0 lost its connection to 1
        ("if rank == 1: sys.exit(3)\nwait()", 1, []),  # the rank behind it is another node's
    ],
)
def test_the_run_ends_as_the_rank_that_ended_it(server: Server, tmp_path: Path, code: str, expected: int, lines: list[str]):
    ended = start(server, tmp_path, code).wait()
    said = [line for line in ended.err.replace(socket.gethostname(), "HOST").splitlines() if line]
    assert (ended.code, said) == (expected, lines)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_reaches_every_rank_and_gives_its_code(server: Server, tmp_path: Path, number: signal.Signals):
    running = start(server, tmp_path, f"signal.signal({number}, stop)\npathlib.Path(f'ready{{rank}}').touch()\nwait()")
    while not all((tmp_path / f"ready{rank}").exists() for rank in (0, 1)):
        time.sleep(0.01)
    running.kill(number)
    ended = running.wait()
    assert (ended.code, ended.err) == (128 + number, "")
    assert sorted(ended.out.splitlines()) == ["rank 0 saves", "rank 1 saves"]
