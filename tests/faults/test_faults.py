"""A few of each kind of fault; `python -m tests.faults` lets every one of them happen."""

from collections.abc import Iterator

import pytest

from tests.faults.harness import Bench
from tests.faults.parts import PARTS
from tests.integration.command import Server

pytestmark = [pytest.mark.integration, pytest.mark.distributed]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    root = tmp_path_factory.mktemp("faults")
    with Server(root / "jobs") as server:
        yield Bench(server, root)


@pytest.mark.parametrize("part", PARTS)
def test_nothing_is_lost(bench: Bench, part: str) -> None:
    for where, trial in PARTS[part](bench, True):
        assert trial(), where
