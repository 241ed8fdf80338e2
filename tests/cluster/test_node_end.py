"""What a node leaves on the machine: nothing, however it ends."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.harness import leftovers
from cluster.harness.cluster import NodeCluster
from cluster.harness.images import WORKER_IMAGE
from cluster.harness.pods import python_pod, wait_ready
from cluster.harness.processes import wait_until

pytestmark = [pytest.mark.node, pytest.mark.timeout(600)]

UP_S = 240.0
SLEEP = "import time; time.sleep(3600)"
KINDS = {"processes", "devices", "routes", "cgroups", "folders"}
OWNER = """
import json, signal
from cluster.harness.cluster import NodeCluster
with NodeCluster() as cluster:
    print(json.dumps(cluster.the_node.place), flush=True)
    signal.pause()
"""


def test_an_end_leaves_nothing(node_possible: None) -> None:
    before = leftovers.machine_state()
    with NodeCluster() as cluster:
        node = cluster.the_node
        cluster.load("worker-test")
        cluster.apply(python_pod("one", "default", SLEEP, WORKER_IMAGE))
        wait_ready(node.objects, "default", "one")
        place = node.place
        assert {kind for kind, found in leftovers.traces(*place).items() if found} == KINDS
    assert leftovers.wait_gone(*place) == {}
    assert leftovers.machine_state() == before


def test_a_killed_owner_leaves_what_the_next_start_removes(node_possible: None, tmp_path: Path) -> None:
    log = tmp_path / "owner.log"
    tests = Path(__file__).parents[1]
    with log.open("w") as errors, (tmp_path / "out").open("w") as out:
        owner = subprocess.Popen(
            [sys.executable, "-c", OWNER], env=os.environ | {"PYTHONPATH": str(tests)}, stdout=out, stderr=errors
        )
    try:
        wait_until(
            lambda: owner.poll() is not None or (tmp_path / "out").read_text().endswith("\n"),
            what="the owner's node",
            deadline_s=UP_S,
            log=log,
        )
        place = json.loads((tmp_path / "out").read_text())
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait(leftovers.GONE_S)
    wait_until(
        lambda: {kind for kind, found in leftovers.traces(*place).items() if found} <= {"cgroups", "folders"},
        what="the killed owner's processes, devices and routes to be gone",
        deadline_s=leftovers.GONE_S,
    )
    leftovers.clean_stale()
    assert leftovers.wait_gone(*place) == {}
