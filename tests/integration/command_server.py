"""Runs commands in processes forked from one that has imported them: megatron-core's imports cost seconds, a fork none.

A request is one JSON line on standard input. The run gets a process of its own, with its own directory, environment,
output files and signals, and goes through `python -m`'s own path to its end, the interpreter's shutdown included. A
minder process waits for it, so that this one never has a child's fate to report, and writes what became of it.
"""

import atexit
import gc
import importlib
import json
import os
import resource
import runpy
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

# Megatron-core's import would load them, and they take as long to load as all the rest.
UNUSED = {"torch._dynamo", "torch._inductor", "wandb", "tensorboard"}


def preload() -> None:
    """Everything that a run imports."""
    for name in ("relax.commands.dry_run", "relax.training.run", "relax.commands.scoring"):
        importlib.import_module(name)
    loaded = UNUSED & sys.modules.keys()
    assert not loaded, f"no run needs {loaded} at its start"
    for name in ("matplotlib.backends.backend_agg", "torch._dynamo", "torch.distributed.run", "relax.tracking.curves"):
        importlib.import_module(name)
    for name in ("AutoTokenizer", "Qwen3Config"):  # lazy modules load when they are named
        getattr(sys.modules["transformers"], name)
    sys.modules["torch"].set_num_threads(1)


def serve() -> dict[str, Any] | None:
    """Fork for each request, until standard input ends (None). In the process that shall run a command: its request."""
    print("ready", flush=True)
    while line := sys.stdin.readline():
        request = json.loads(line)
        if os.fork() == 0:
            return request if mind(Path(request["job"])) else None
        reap()
        print("started", flush=True)
    return None


def reap() -> None:
    """Bury minders that are done."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return
        except ChildProcessError:
            return


def mind(job: Path) -> bool:
    """Fork once more. True in the process that is to run; the minder waits for it, reports and ends."""
    pid = os.fork()
    if pid == 0:
        return True
    (job / "pid").write_text(str(pid))
    _, status, usage = os.wait4(pid, 0)
    report = {"code": os.waitstatus_to_exitcode(status), "cpu": usage.ru_utime + usage.ru_stime}
    (job / "aside").write_text(json.dumps(report))
    (job / "aside").rename(job / "ended")
    os._exit(0)


def become(request: dict[str, Any]) -> None:
    """Take on the request's directory, environment, output files and limits."""
    job = Path(request["job"])
    for descriptor, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, job / "out", os.O_WRONLY | os.O_CREAT),
        (2, job / "err", os.O_WRONLY | os.O_CREAT),
    ):
        os.dup2(os.open(path, flags), descriptor)
    for kind in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(kind, signal.default_int_handler if kind == signal.SIGINT else signal.SIG_DFL)
    os.environ.update(request["environment"])
    time.tzset()
    os.chdir(request["directory"])
    if request["file_limit"] is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond it then fails, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_limit"], resource.RLIM_INFINITY))
    if not request["draws"]:  # curves cost as much time as all the rest of a tiny run
        import relax.training.run

        relax.training.run.curves = lambda log, output: None


def run(module: str, arguments: list[str]) -> int:
    """`python -m module arguments`; its exit code."""
    sys.argv = [module, *arguments]
    sys.modules.pop(module, None)  # else a command that another one imports runs under a warning
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    preload()
    gc.freeze()  # collecting would copy what all runs share
    if (mine := serve()) is not None:
        become(mine)
        code = run(mine["module"], mine["arguments"])
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))  # for coverage's file
        threading._shutdown()  # what an interpreter's end does, but for freeing its modules one by one: seconds of copies
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
