"""Generators that pass weights on: each byte leaves the trainer once for a cluster, and whoever is lost on the way is replaced."""

import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from streamrl.keys import ENV_CLUSTER, ENV_WEIGHTS_ADDRESS, ENV_WEIGHTS_PORT
from support.gates import REWARD, Gate
from support.jobs import simulated_job, write_prompts
from support.metric_pages import families, series
from support.runs import wait_for
from support.stalls import HeldLink
from support.worker_processes import Workers

WEIGHT_BYTES = 3_000_000
TRAINER = "trainer-0"


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    """A job whose gate stays shut: there is one version."""
    Gate.shut(tmp_path)
    write_prompts(tmp_path / "prompts.jsonl")
    job: dict[str, Any] = simulated_job(replicas=8)
    job["spec"]["task"]["rewards"] = [REWARD]
    job["spec"]["trainer"]["engine"]["simulated"]["weightBytes"] = WEIGHT_BYTES
    made = Workers.prepare(job, folder=tmp_path / "run")
    made.start_scheduler()
    yield made
    for process in made.processes.values():
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
    made.close()


def name(number: int) -> str:
    return f"generator-sim-{number}"


def start_generators(workers: Workers, count: int, *, cluster: str, first: int = 0) -> None:
    """One after the other: so they stand in the scheduler's order."""
    for number in range(first, first + count):
        workers.start(name(number), **{ENV_WEIGHTS_PORT: "0", ENV_CLUSTER: cluster})
        wait_for(
            lambda number=number: len(workers.numbers().get("generators", ())) > number,  # type: ignore[misc]
            what=f"{name(number)}; {workers.text(name(number))}",
        )


def until_loaded(workers: Workers, *numbers: int) -> None:
    for number in numbers:
        wait_for(
            lambda number=number: workers.page("healthz", process=name(number)).strip() == "ok",  # type: ignore[misc]
            what=f"weights in {name(number)}; {workers.text(name(number))} {workers.text('scheduler')}",
        )


def arrived(workers: Workers, number: int) -> dict[str, float]:
    page = families(workers.page("metrics", process=name(number)).encode())
    return {one.labels["source"]: one.value for one in page["streamrl_weights_pulled_bytes_total"].samples}


def served(workers: Workers, process: str = TRAINER) -> float:
    return series(workers.page("metrics", process=process).encode(), "streamrl_weights_served_bytes_total")


@pytest.mark.parametrize("count", [1, 4, 8])
def test_the_trainer_sends_each_byte_once(workers: Workers, count: int) -> None:
    start_generators(workers, count, cluster="far")
    workers.start(TRAINER)
    until_loaded(workers, *range(count))
    wait_for(lambda: served(workers) == WEIGHT_BYTES, what="the count of what was sent")
    assert arrived(workers, 0) == {"trainer": WEIGHT_BYTES, "peer": 0, "cache": 0}
    for number in range(1, count):
        assert arrived(workers, number) == {"trainer": 0, "peer": WEIGHT_BYTES, "cache": 0}
        wait_for(lambda number=number: served(workers, name(number - 1)) == WEIGHT_BYTES, what="the peer's count")  # type: ignore[misc]
    assert served(workers) == WEIGHT_BYTES


def test_each_cluster_takes_a_copy_and_a_late_one_none(workers: Workers) -> None:
    start_generators(workers, 2, cluster="far")
    start_generators(workers, 1, cluster="", first=2)
    workers.start(TRAINER)
    until_loaded(workers, 0, 1, 2)
    start_generators(workers, 1, cluster="far", first=3)
    until_loaded(workers, 3)
    wait_for(lambda: served(workers) == 2 * WEIGHT_BYTES, what="the count of what was sent")
    assert arrived(workers, 3) == {"trainer": 0, "peer": WEIGHT_BYTES, "cache": 0}


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP])
def test_a_puller_that_is_lost_on_the_way_is_replaced(workers: Workers, by: signal.Signals) -> None:
    link = HeldLink()
    start_generators(workers, 3, cluster="far")
    workers.start(TRAINER, **{ENV_WEIGHTS_ADDRESS: link.address})
    with link.to(str(workers.endpoint(TRAINER)["weights"])):
        link.hold()
        workers.processes[name(0)].send_signal(by)
        link.release()
        until_loaded(workers, 1, 2)
        whence = [arrived(workers, number) for number in (1, 2)]
        assert sorted(one["trainer"] for one in whence) == [0, WEIGHT_BYTES]
        assert sorted(one["peer"] for one in whence) == [0, WEIGHT_BYTES]
        assert served(workers) <= 2 * WEIGHT_BYTES, "what the lost one had asked for, and one copy"
