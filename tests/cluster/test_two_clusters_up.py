"""Two clusters that stay, as a person has them: told how they are used, the link changed by a command, nothing left of them."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.harness import leftovers, tools
from cluster.harness.api import Api
from cluster.harness.processes import wait_until
from cluster.harness.up import DOWN_S, UP_S

pytestmark = [pytest.mark.node, pytest.mark.soak, pytest.mark.timeout(1500)]

TESTS = Path(__file__).parents[1]
KINDS = {"processes", "devices", "routes", "cgroups", "folders"}
GONE_S = 120.0
Place = tuple[str, str, str]


@pytest.fixture
def environment(node_possible: None, tmp_path: Path) -> dict[str, str]:
    """Of a person who has no cluster up, with the programs, images and numbers of this machine."""
    cache = tmp_path / "streamrl"
    cache.mkdir()
    for one in tools.cache().iterdir():
        if one.name != "cluster":
            (cache / one.name).symlink_to(one)
    return os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(TESTS)}


def run(environment: dict[str, str], *arguments: str, deadline_s: float = DOWN_S) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "cluster.harness.up", *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=deadline_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def said(environment: dict[str, str]) -> Iterator[str]:
    yield run(environment, "up", "2", "2", deadline_s=UP_S)
    run(environment, "down")


def owner_of(environment: dict[str, str]) -> int:
    state = Path(environment["XDG_CACHE_HOME"], "streamrl/cluster/state.json")
    return int(json.loads(state.read_text())["pid"])


def places_of(environment: dict[str, str], said: str) -> list[Place]:
    """(mark, device, namespace of processes) of each cluster."""
    marks = Path(tempfile.gettempdir()).glob(f"{leftovers.PREFIX}{owner_of(environment)}-*")
    numbers = re.findall(r"10\.200\.(\d+)\.2", "".join(file.read_text() for file in kubeconfigs(said)))
    inner = [str(Path(f"/proc/{pid}/ns/pid").readlink()) for pid in re.findall(r"--net=/proc/(\d+)/", said)]
    return [
        (mark.name, f"srl{number}", namespace)
        for mark, number, namespace in zip(sorted(marks), numbers, inner, strict=True)
    ]


def kubeconfigs(said: str) -> list[Path]:
    return [Path(found) for found in re.findall(r"^export \w+=(\S+)", said, re.MULTILINE)]


def test_two_clusters_stay_until_they_are_taken_down(environment: dict[str, str], said: str) -> None:
    assert said.startswith("up: level 2, two clusters")
    assert run(environment, "up", "2", "2") == said == run(environment, "status")
    for file in kubeconfigs(said):
        with Api(file) as api:
            assert api.get("/api/v1/nodes/node-1").ok
    assert json.loads(run(environment, "link", "cut"))["shape"]["cut"] is True
    assert json.loads(run(environment, "link", "slow", "50", "100"))["shape"] == {
        "delay_s": 0.05,
        "rate_bps": 50e6,
        "loss": 0.0,
        "cut": True,
        "buffer_s": 0.1,
    }
    assert json.loads(run(environment, "link", "heal"))["shape"]["cut"] is False
    places, folders = places_of(environment, said), [file.parent for file in kubeconfigs(said)]
    assert len(places) == 2
    for place in places:
        assert {kind for kind, found in leftovers.traces(*place).items() if found} == KINDS
    assert run(environment, "down") == "down\n"
    assert [leftovers.wait_gone(*place) for place in places] == [{}, {}]
    assert [folder for folder in folders if folder.exists()] == []


def test_nothing_runs_on_when_their_owner_is_killed(environment: dict[str, str], said: str) -> None:
    places, folders = places_of(environment, said), [file.parent for file in kubeconfigs(said)]
    os.kill(owner_of(environment), signal.SIGKILL)
    for place in places:
        wait_until(
            lambda: {kind for kind, found in leftovers.traces(*place).items() if found} <= {"cgroups", "folders"},  # noqa: B023 - asked within the loop
            what="the killed owner's processes, devices and routes to be gone",
            deadline_s=GONE_S,
        )
    wait_until(lambda: not any(folder.exists() for folder in folders), what="the folders to be gone", deadline_s=GONE_S)
    leftovers.clean_stale()
    assert [leftovers.wait_gone(*place) for place in places] == [{}, {}]
