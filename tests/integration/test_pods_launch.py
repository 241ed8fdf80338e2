"""The ranks of a node, started by the trainer's container: they live and die together, and say why once."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamrl import keys, names
from streamrl.errors import EXIT_DONE, EXIT_USER_ERROR
from streamrl_workers.process.silences import folders_of, read_silences
from support.jobs import simulated_job
from support.pods import Pods
from support.runs import wait_for

KILLED = 128 + signal.SIGKILL


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    made = Pods.make(job_of_ranks(processesPerNode=2), base=tmp_path / "pods")
    yield made
    made.close()


def job_of_ranks(**trainer: int) -> dict[str, Any]:
    job = simulated_job()
    job["spec"]["trainer"] = {"engine": {"torch": {}}, **trainer}
    job["spec"]["generators"][0]["engine"] = {"hf": {}}
    return job


def worker_of(pods: Pods) -> str:
    """Its first further node's pod."""
    return f"{names.trainer_workers(pods.name)}-0"


def ranks(pods: Pods, *, pod: str = "trainer") -> dict[int, psutil.Process]:
    """The living ranks; they wait for the model, which nobody makes here."""
    found = {}
    for child in psutil.Process(pods.processes[pod].pid).children():
        # A child that has been forked and not yet replaced still looks like the launcher: it has no rank.
        if child.status() != psutil.STATUS_ZOMBIE and (rank := child.environ().get(keys.ENV_RANK)) is not None:
            found[int(rank)] = child
    return found


def start(pods: Pods, *, container: str = "trainer", **changes: str) -> dict[int, psutil.Process]:
    """Until both ranks have read their settings: what ends them then, they hear."""
    pod = container if container == "trainer" else worker_of(pods)
    pods.start(container, pod="" if container == "trainer" else pod, **changes)
    started: dict[int, psutil.Process] = wait_for(
        lambda: len(found := ranks(pods, pod=pod)) == 2 and found, what=f"two ranks; {pods.logs()}"
    )
    wait_for(lambda: all(_waits(rank) for rank in started.values()), what=f"both to wait; {pods.logs()}")
    return started


def _waits(rank: psutil.Process) -> bool:
    """Whether it takes SIGTERM itself."""
    caught = next(line for line in Path(f"/proc/{rank.pid}/status").read_text().splitlines() if "SigCgt" in line)
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


def gone(started: dict[int, psutil.Process]) -> bool:
    return not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in started.values())


def test_ranks_have_torchruns_environment(pods: Pods) -> None:
    started = start(pods)
    first, second = (started[rank].environ() for rank in range(2))
    for name in (keys.ENV_MASTER_PORT, keys.ENV_TOKEN, keys.ENV_MASTER_ADDR, keys.ENV_WORLD_SIZE):
        assert first[name] == second[name], name
    assert (first[keys.ENV_WORLD_SIZE], first[keys.ENV_MASTER_ADDR]) == ("2", "127.0.0.1")
    assert len(first[keys.ENV_TOKEN]) >= 32
    assert [env[keys.ENV_LOCAL_RANK] for env in (first, second)] == ["0", "1"]
    assert [env[keys.ENV_PROCESS] for env in (first, second)] == ["trainer-0", "trainer-1"]
    assert first[keys.ENV_SIGNALS_PORT] == str(pods.ports["trainer"])
    assert second[keys.ENV_SIGNALS_PORT] == second[keys.ENV_WEIGHTS_PORT] == "0", "a port is rank 0's alone"
    assert pods.terminate("trainer") == EXIT_DONE, pods.text("trainer")
    assert gone(started)


def test_a_killed_rank_ends_all(pods: Pods) -> None:
    started = start(pods)
    started[1].kill()
    assert pods.wait("trainer") == KILLED, pods.text("trainer")
    assert pods.last_line("trainer") == f"rank 1 ended with exit code {KILLED}"
    assert gone(started)


def test_a_frozen_rank_ends_all(pods: Pods) -> None:
    """The container's own heartbeat is the launcher's: it looks after the ranks'."""
    started = start(pods, **{keys.ENV_LIVENESS_SECONDS: "12"})
    started[1].suspend()
    assert pods.wait("trainer") == KILLED, pods.text("trainer")
    assert pods.last_line("trainer") == f"rank 1 ended with exit code {KILLED}"
    assert re.search(r"rank 1 has shown no sign of life for \d+ s, since ", pods.text("trainer"))
    (notice,) = read_silences(
        folders_of({key: str(value) for key, value in pods.environment("scheduler").items()})
    ).values()
    assert re.fullmatch(r"rank 1 has shown no sign of life since .*: it is killed", notice.message)
    assert gone(started)


def test_what_a_user_must_change_wins(pods: Pods) -> None:
    """Rank 0 refuses its input; the other one waits for it, and does not say the last word."""
    pods.start("trainer", **{keys.ENV_SCHEDULER_ADDRESS: None, keys.ENV_MODEL_PATH: str(pods.base)})
    assert pods.wait("trainer") == EXIT_USER_ERROR, pods.text("trainer")
    assert pods.last_line("trainer").startswith(f"{keys.ENV_SCHEDULER_ADDRESS}: must be set")


def test_no_rank_outlives_the_launcher(pods: Pods) -> None:
    started = start(pods)
    os.kill(pods.processes["trainer"].pid, signal.SIGKILL)
    wait_for(lambda: gone(started), what="the ranks to end")


def test_one_rank_is_the_process_itself(tmp_path: Path) -> None:
    pods = Pods.make(simulated_job(), base=tmp_path / "one")
    try:
        child = pods.start("trainer")
        process = psutil.Process(child.pid)
        wait_for(lambda: process.cmdline()[-1:] == ["streamrl_workers.trainer"], what=f"the rank; {pods.logs()}")
        wait_for(lambda: pods.page("trainer", "numbers")[0] == 200, what=f"its signals port; {pods.logs()}")
        assert pods.terminate("trainer") == EXIT_DONE, pods.text("trainer")
    finally:
        pods.close()


def test_ranks_of_several_nodes_have_one_numbering_and_one_secret(tmp_path: Path) -> None:
    pods = Pods.make(job_of_ranks(nodes=2, processesPerNode=2), base=tmp_path / "nodes")
    try:
        first, second = start(pods), start(pods, container="trainer-worker")
        environs = {rank: process.environ() for rank, process in (first | second).items()}
        assert sorted(environs) == [0, 1, 2, 3]
        for name in (keys.ENV_MASTER_PORT, keys.ENV_MASTER_ADDR, keys.ENV_TOKEN, keys.ENV_WORLD_SIZE):
            assert len({environ[name] for environ in environs.values()}) == 1, name
        assert environs[3][keys.ENV_WORLD_SIZE] == "4"
        assert [environs[rank][keys.ENV_LOCAL_RANK] for rank in range(4)] == ["0", "1", "0", "1"]
        assert [environs[rank][keys.ENV_PROCESS] for rank in range(4)] == [f"trainer-{rank}" for rank in range(4)]
        assert len(environs[0][keys.ENV_TOKEN]) >= 32
        assert pods.terminate(worker_of(pods)) == EXIT_DONE, pods.text(worker_of(pods))
        assert gone(second) and not gone(first)
    finally:
        pods.close()


def test_a_node_that_is_not_of_the_job_is_refused(tmp_path: Path) -> None:
    pods = Pods.make(job_of_ranks(nodes=2), base=tmp_path / "nodes")
    try:
        pods.start_worker(1)
        name = f"{names.trainer_workers(pods.name)}-1"
        assert pods.wait(name) == EXIT_USER_ERROR
        assert pods.last_line(name) == f"{keys.ENV_NODE_ORDINAL}: must be below 1, got 1"
    finally:
        pods.close()


def test_without_a_job_it_says_what_is_missing(pods: Pods) -> None:
    (pods.base / "job" / keys.FILE_JOB).unlink()
    pods.start("trainer")
    assert pods.wait("trainer") == EXIT_USER_ERROR
    assert "job.json: cannot be read" in pods.last_line("trainer")
