"""A cluster that stays: up, used by tests as one that was given, down, nothing left."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.harness import reaper, tools
from cluster.harness.control_plane import ControlPlane

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
COMMAND_S = 400


@pytest.fixture
def environment(own_control_plane: ControlPlane, tmp_path: Path) -> dict[str, str]:
    """A user whose programs lie in KUBEBUILDER_ASSETS and who has no cluster up."""
    assets = tmp_path / "assets"
    assets.mkdir()
    for one in tools.TOOLS.values():
        if one.level == 1 and one.name != "helm":
            (assets / one.name).symlink_to(tools.tool(one.name))
    (assets / "helm").symlink_to("/bin/true")  # `up` makes sure of it and does not use it
    ours = {"KUBEBUILDER_ASSETS": str(assets), "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(TESTS)}
    not_theirs = (
        reaper.MARK_VARIABLE,
        "STREAMRL_REQUIRE",
    )  # tests that need a cluster of their own are to skip on one that is given
    return {name: value for name, value in os.environ.items() if name not in not_theirs} | ours


def run(environment: dict[str, str], *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def kubeconfig(environment: dict[str, str]) -> Iterator[str]:
    said = run(environment, "cluster.harness.up", "up")
    yield re.findall(r"^export KUBECONFIG=(\S+)$", said, re.MULTILINE)[0]
    run(environment, "cluster.harness.up", "down")


@pytest.mark.soak
def test_a_cluster_stays_until_it_is_taken_down(environment: dict[str, str], kubeconfig: str) -> None:
    folder = Path(kubeconfig).parent
    assert run(environment, "cluster.harness.up", "up").startswith("up: level 1")
    chosen = ["tests/cluster/test_crds.py", "tests/cluster/test_harness.py", "-k", "takes_the_definition or comes_back"]
    given = environment | {"STREAMRL_TEST_KUBECONFIG": kubeconfig}
    said = run(given, "pytest", "-q", "-p", "no:cacheprovider", *chosen)
    assert "2 passed, 1 skipped" in said
    assert "STREAMRL_TEST_KUBECONFIG names another's" in said
    assert run(environment, "cluster.harness.up", "down") == "down\n"
    assert not folder.exists()
    assert run(environment, "cluster.harness.up", "status") == "no cluster is up\n"
