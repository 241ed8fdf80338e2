"""`make cluster-up` and `make cluster-down`: a cluster, or two, that stay while a person works with them.

    python -m cluster.harness.up up [LEVEL [CLUSTERS]] | down | status | link COMMAND          (with PYTHONPATH=tests)

`up` starts `run` as a process of its own, which owns the cluster and writes the state file once it serves; `down` ends it.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from cluster.harness import link
from cluster.harness.base import Cluster
from cluster.harness.processes import ClusterError, tail, wait_until
from cluster.harness.tools import ToolError, build, cache

UP_S, DOWN_S = 900.0, 300.0
"""On a busy machine, which also makes the images."""
KINDS = {
    ("1", "1"): "level 1, control plane",
    ("2", "1"): "level 2, control plane and a node",
    ("2", "2"): "level 2, two clusters with a node each and a link between them",
}
"""(level, clusters): what it is."""
State = dict[str, str | int]


def _state() -> Path:
    return cache() / "cluster" / "state.json"


def running() -> State | None:
    """Return what `run` wrote, None where no cluster is up."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        state: State = json.loads(_state().read_text())
        os.kill(int(state["pid"]), 0)
        return state
    return None


def up(level: str, clusters: str) -> str:
    """Start what is wanted, return how to use it."""
    if state := running():
        return _told(state)
    build(int(level))
    _state().parent.mkdir(parents=True, exist_ok=True)
    _state().unlink(missing_ok=True)
    log = _state().with_name("cluster.log")
    with log.open("wb") as file:
        owner = subprocess.Popen(
            [sys.executable, "-m", "cluster.harness.up", "run", level, clusters],
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


def _told(state: State) -> str:
    return f"up: {state['kind']}\n{state['use']}"


def down() -> str:
    """End the cluster."""
    state = running()
    if state is None:
        return "no cluster is up\n"
    os.kill(int(state["pid"]), signal.SIGTERM)
    wait_until(lambda: running() is None, what="the cluster to end", deadline_s=DOWN_S)
    return "down\n"


@contextlib.contextmanager
def _opened(level: str, clusters: str) -> Iterator[State]:
    """What is wanted, with our CRDs, for the block, and how a person uses it."""
    if clusters == "2":
        from cluster.harness.two_clusters import TwoClusters

        with TwoClusters() as two:
            yield {"use": two.use, "link": str(two.link.path)}
    elif level == "2":
        from cluster.harness.cluster import open_node_cluster

        with open_node_cluster() as cluster:
            yield _use(cluster)
    else:
        from cluster.harness.control_plane import ControlPlane

        with ControlPlane() as plane:
            yield _use(plane)


def _use(cluster: Cluster) -> State:
    cluster.apply_crds()
    return {
        "use": f"export KUBECONFIG={cluster.kubeconfig}\n"
        f"export STREAMRL_TEST_KUBECONFIG={cluster.kubeconfig}   # for the tests to use it\n"
    }


def run(level: str, clusters: str) -> None:
    """Own what is wanted until SIGTERM."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    with _opened(level, clusters) as state:
        half = _state().with_suffix(".half")
        half.write_text(json.dumps({"pid": os.getpid(), "kind": KINDS[level, clusters], **state}))
        half.rename(_state())
        signal.sigwait({signal.SIGTERM, signal.SIGINT})
        # The signals stay blocked: the end must not be cut short.
    _state().unlink(missing_ok=True)


def main(arguments: list[str]) -> int:
    """Run the command line."""
    try:
        match arguments:
            case ["up", *wanted] if (kind := (*wanted, *("1", "1")[len(wanted) :])) in KINDS:
                sys.stdout.write(up(*kind))
            case ["down"]:
                sys.stdout.write(down())
            case ["status"]:
                state = running()
                sys.stdout.write(_told(state) if state else "no cluster is up\n")
            case ["link", *command] if "link" in (state := running() or {}):
                return link.main([str(state["link"]), *command])
            case ["link", *_]:
                sys.stderr.write("no two clusters are up\n")
                return 1
            case ["run", level, clusters]:
                run(level, clusters)
            case _:
                sys.stderr.write(__doc__ or "")
                return 2
    except (ClusterError, ToolError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
