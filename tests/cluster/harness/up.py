"""`make cluster-up` and `make cluster-down`: a cluster that stays while a person works with it.

    python -m cluster.harness.up up [LEVEL] | down | status          (with PYTHONPATH=tests)

`up` starts `run` as a process of its own, which owns the cluster and writes the state file once it serves; `down` ends it.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

from cluster.harness.base import Cluster
from cluster.harness.processes import ClusterError, tail, wait_until
from cluster.harness.tools import ToolError, build, cache

UP_S, DOWN_S = 300.0, 120.0
LEVELS = {"1": "control plane", "2": "control plane and a node"}


def _state() -> Path:
    return cache() / "cluster" / "state.json"


def running() -> dict[str, str | int] | None:
    """Return what `run` wrote, None where no cluster is up."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        state: dict[str, str | int] = json.loads(_state().read_text())
        os.kill(int(state["pid"]), 0)
        return state
    return None


def up(level: str) -> str:
    """Start a cluster, return how to use it."""
    if state := running():
        return _told(state)
    build(int(level))
    _state().parent.mkdir(parents=True, exist_ok=True)
    _state().unlink(missing_ok=True)
    log = _state().with_name("cluster.log")
    with log.open("wb") as file:
        owner = subprocess.Popen(
            [sys.executable, "-m", "cluster.harness.up", "run", level],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def serves() -> bool:
        if (code := owner.poll()) is not None:
            raise ClusterError(f"the cluster ended with {code}; end of {log}:\n{tail(log)}")
        return _state().exists()

    wait_until(serves, what="the cluster to be up", deadline_s=UP_S, log=log)
    return _told(json.loads(_state().read_text()))


def _told(state: dict[str, str | int]) -> str:
    return (
        f"up: level {state['level']}, {LEVELS[str(state['level'])]}\n"
        f"export KUBECONFIG={state['kubeconfig']}\n"
        f"export STREAMRL_TEST_KUBECONFIG={state['kubeconfig']}   # for the tests to use it\n"
    )


def down() -> str:
    """End the cluster."""
    state = running()
    if state is None:
        return "no cluster is up\n"
    os.kill(int(state["pid"]), signal.SIGTERM)
    wait_until(lambda: running() is None, what="the cluster to end", deadline_s=DOWN_S)
    return "down\n"


def _open(level: str) -> AbstractContextManager[Cluster]:
    if level == "2":
        from cluster.harness.cluster import open_node_cluster

        return open_node_cluster()
    from cluster.harness.control_plane import ControlPlane

    return ControlPlane()


def run(level: str) -> None:
    """Own a cluster until SIGTERM."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    with _open(level) as cluster:
        cluster.apply_crds()
        half = _state().with_suffix(".half")
        half.write_text(json.dumps({"pid": os.getpid(), "kubeconfig": str(cluster.kubeconfig), "level": level}))
        half.rename(_state())
        signal.sigwait({signal.SIGTERM, signal.SIGINT})
        # The signals stay blocked: the end must not be cut short.
    _state().unlink(missing_ok=True)


def main(arguments: list[str]) -> int:
    """Run the command line."""
    try:
        match arguments:
            case ["up"] | ["up", "1" | "2"]:
                sys.stdout.write(up(arguments[1] if len(arguments) > 1 else "1"))
            case ["down"]:
                sys.stdout.write(down())
            case ["status"]:
                state = running()
                sys.stdout.write(_told(state) if state else "no cluster is up\n")
            case ["run", "1" | "2" as level]:
                run(level)
            case _:
                sys.stderr.write(__doc__ or "")
                return 2
    except (ClusterError, ToolError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
