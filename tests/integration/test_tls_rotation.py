"""Certificates change while a job runs: leaves, the authority (trust both, swap leaves, drop the old), and connections that grow old."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl import keys
from support.certificates import Authority, mount
from support.jobs import simulated_job, write_prompts
from support.pods import Pods
from support.runs import wait_for

AGE_S = 2.0
"""Longest life of a connection here: several of them in one run."""
STEPS = 300
DEADLINE_S = 400.0
"""Of the whole run: a minute alone."""
LEASE_S = 60.0
"""Connections end by their age alone."""
NAMES = ("generator-sim-0", "generator-sim-1", "trainer-0")


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    job = simulated_job(steps=STEPS, replicas=2)
    job["spec"]["trainer"]["engine"]["simulated"] = {"secondsPerStep": 0.2}
    job["spec"]["scheduling"]["leaseSeconds"] = LEASE_S
    job["spec"]["storage"]["checkpoints"] = {"intervalSteps": 20}
    made = Pods.make(job, base=tmp_path / "pods")
    write_prompts(made.run_dir / "prompts.jsonl")
    yield made
    made.close()


def start(pods: Pods, *, clients_s: float | None = AGE_S, servers_s: float | None = AGE_S) -> None:
    """Both sides' idea of how old a connection may be; None: their own."""
    clients, servers = (
        {} if age_s is None else {keys.ENV_CONNECTION_AGE: str(age_s)} for age_s in (clients_s, servers_s)
    )
    for ordinal in range(2):
        pods.start_generator(ordinal, **clients)
    pods.start("scheduler", **servers)
    pods.start("trainer", **clients)
    wait_for_generators(pods, 2)


def wait_for_generators(pods: Pods, count: int) -> None:
    """An old connection may end before the new one has begun."""
    wait_for(lambda: len(pods.numbers().get("generators", ())) == count, what=f"{count} generators; {pods.logs()}")


def joins(pods: Pods) -> Counter[str]:
    """Connections of generators and trainer so far."""
    return Counter(re.findall(r"(?:generator|trainer) (\S+) has joined", pods.text("scheduler")))


def wait_for_new_connections(pods: Pods) -> None:
    """Until each of the three has connected anew, twice: with what is mounted now."""
    wanted = joins(pods) + Counter(dict.fromkeys(NAMES, 2))
    wait_for(lambda: joins(pods) >= wanted, what=f"new connections after {wanted}; {pods.logs()}")


def test_a_new_authority_takes_over_while_the_job_runs(pods: Pods) -> None:
    start(pods)
    pods.wait_step(5)
    old, new = pods.ca, Authority("new")
    pods.mount_all(trusted=(old, new))
    wait_for_new_connections(pods)
    pods.ca = new
    pods.mount_all(trusted=(old, new))
    wait_for_new_connections(pods)
    pods.mount_all(trusted=(new,))
    wait_for_new_connections(pods)
    wait_for_generators(pods, 2)
    wait_for(lambda: pods.numbers()["trainer"], what=f"the trainer; {pods.logs()}")
    assert not any(pods.ended(name) for name in pods.processes), pods.logs()
    pods.start_generator(2)  # one that has never seen the old authority
    wait_for_generators(pods, 3)
    pods.wait_step(pods.numbers()["step"] + 10)
    assert "took new certificates" in pods.text("scheduler")
    assert pods.numbers()["attempt"] == 1, "the trainer has not started again"
    result = pods.wait_result(deadline_s=DEADLINE_S)
    assert (result["status"], result["steps"]) == ("succeeded", STEPS)
    pods.assert_exact()


def test_files_that_do_not_fit_leave_everything_as_it_was(pods: Pods) -> None:
    start(pods)
    pods.wait_step(3)
    for role in ("scheduler", "trainer", "generator"):
        (pods.base / "tls" / role / "..data" / "tls.key").write_bytes(pods.leaf(role).key_pem)
    wait_for_new_connections(pods)
    wait_for_generators(pods, 2)
    assert pods.text("scheduler").count("cannot be used, the old ones stay: tls.key is not the key") == 1
    pods.mount_all()
    wait_for(lambda: "took new certificates" in pods.text("scheduler"), what=f"the good ones; {pods.logs()}")
    pods.assert_exact()


def departures(pods: Pods) -> int:
    """Connections of the first generator that have ended so far."""
    return pods.text("scheduler").count("generator generator-sim-0 has left")


def wait_for_trainer(pods: Pods) -> None:
    """Until the trainer has connected anew, three times: as much time for a generator to do so."""
    wanted = pods.text("scheduler").count("trainer trainer-0 has joined") + 3
    wait_for(
        lambda: pods.text("scheduler").count("trainer trainer-0 has joined") >= wanted,
        what=f"new connections of the trainer; {pods.logs()}",
    )


def test_a_leaf_that_the_server_does_not_take_breaks_no_connection(pods: Pods) -> None:
    """Make before break: the old connection serves until the server ends it."""
    start(pods, servers_s=None)
    pods.wait_step(3)
    foreign = Authority("foreign")
    mount(pods.base / "tls" / "generator", trusted=(pods.ca,), leaf=foreign.leaf("generator", job=pods.name))
    wait_for_trainer(pods)
    before = departures(pods)
    wait_for_trainer(pods)
    assert departures(pods) == before
    assert len(pods.numbers()["generators"]) == 2
    mount(pods.base / "tls" / "generator", trusted=(pods.ca,), leaf=pods.leaf("generator"))
    wait_for(lambda: departures(pods) > before, what=f"a new connection with the good leaf; {pods.logs()}")
    wait_for_generators(pods, 2)
    pods.assert_exact()


def test_a_server_ends_old_connections_of_those_who_do_not_and_nothing_is_lost(pods: Pods) -> None:
    start(pods, clients_s=None)
    pods.wait_step(3)
    wait_for_new_connections(pods)
    wait_for_generators(pods, 2)
    assert pods.numbers()["attempt"] == 1
    pods.assert_exact()
