"""What `relax.launch.on_ray` gives to Ray and what to the ranks, with Ray's part played in this process."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relax.launch import on_ray as launch_ray

SECRETS = {"WANDB_API_KEY": "0123456789secretkeyofwandb", "HF_TOKEN": "hf_secrettokenofthehub", "NCCL_KEY": "secret"}
SHOWN = {"PYTHONPATH": "here", "GLOO_SOCKET_IFNAME": "lo"}
PLAIN = {"OMP_NUM_THREADS": "3", "HF_HUB_OFFLINE": "1"}
RANK = "import json, os; json.dump(dict(os.environ), open('got', 'w'))"


class Calls:
    """An actor's handle, whose `method.remote(...)` calls the method at once."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._actor, name))


def test_keys_go_to_the_ranks_and_not_into_rays_runtime_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in (SECRETS | SHOWN | PLAIN | {"AWS_SECRET_ACCESS_KEY": "not for ranks"}).items():
        monkeypatch.setenv(name, value)
    told: list[Any] = []  # all that Ray keeps: how it was started, and what the actor was made with
    board_class = launch_ray.Board.__ray_metadata__.modified_class

    def make(*arguments: Any) -> Calls:
        told.append(arguments)
        return Calls(board_class(*arguments))

    def fit(args: Any, board: Calls, problem: list[Exception]) -> None:
        for name in SECRETS | SHOWN | PLAIN:
            monkeypatch.delenv(name)  # a worker on another machine has none of them
        config = {"board": board, "command": args.command, "directory": str(tmp_path)}
        told.append({key: value for key, value in config.items() if key != "board"})
        launch_ray.run_rank(config)

    monkeypatch.setattr("sys.argv", ["launch_ray", "--num-workers", "1", "-m", "rank"])
    (tmp_path / "rank.py").write_text(RANK)
    monkeypatch.setattr(launch_ray, "Board", SimpleNamespace(remote=make))
    monkeypatch.setattr(launch_ray, "_fit", fit)
    monkeypatch.setattr(launch_ray, "get_context", lambda: SimpleNamespace(get_world_rank=lambda: 1))
    monkeypatch.setattr(launch_ray, "ignore_stops", lambda: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("torch.distributed.broadcast_object_list", lambda values, src: None)
    monkeypatch.setattr("ray.init", lambda **options: told.append(options))
    monkeypatch.setattr("ray.get", lambda value: value)
    monkeypatch.setattr("ray.shutdown", lambda: None)
    launch_ray.main()

    got = json.loads((tmp_path / "got").read_text())
    assert SECRETS.items() | SHOWN.items() | PLAIN.items() <= got.items()
    assert told[0]["runtime_env"] == {"env_vars": SHOWN} and told[1] == ()
    assert not any(value in str(told) for value in SECRETS.values())
