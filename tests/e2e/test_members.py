"""Jobs with their trainer in one real cluster and generators in another, over a link of 40 ms and 200 Mbit/s, the only way between them."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster.harness.cluster import NodeCluster
from cluster.harness.processes import Server
from cluster.harness.two_clusters import TwoClusters
from cluster.members import Pair, wait_gone
from cluster.operators import Operator
from e2e.conftest import in_both
from e2e.jobs import chain_sum, chain_sum_code, simulated
from e2e.stage import RUN_S, Stage
from streamrl import names

pytestmark = [pytest.mark.node, pytest.mark.e2e, pytest.mark.timeout(1500)]

STEPS = 10
WEIGHT_BYTES = 4_000_000
COUNTED = 6
"""Steps over which bytes are counted."""
SLACK = 0.15
"""TLS, TCP and IP, prompts, and a version that is under way at either end."""
PROXY_PORT = 8443
MINUTE = 60
"""Steps of a second."""


@pytest.fixture
def joined(two_clusters: TwoClusters) -> Iterator[tuple[Stage, Pair, Operator]]:
    """A namespace of the hub, its place in the member, and an operator in the hub's network."""
    with in_both(two_clusters) as made:
        yield made


def far_away(pair: Pair, *, replicas: int = 2, **changes: Any) -> dict[str, Any]:
    """A job of simulated engines whose generators are all in the member: without them there is no step."""
    job = simulated("far", **{"steps": STEPS, **changes}, replicas=replicas)
    (pool,) = job["spec"]["generators"]
    pool["clusterName"] = pair.name
    return job


def near_and_far(job: dict[str, Any], pair: Pair, *, replicas: int) -> dict[str, Any]:
    """The same job with one generator at home and `replicas` in the member."""
    (pool,) = job["spec"]["generators"]
    job["spec"]["generators"] = [
        {**pool, "name": "near", "scaling": {"static": {"replicas": 1}}},
        {**pool, "name": "away", "scaling": {"static": {"replicas": replicas}}, "clusterName": pair.name},
    ]
    return job


def test_a_job_whose_generators_are_all_in_a_member_runs_to_its_end_and_leaves_nothing_there(
    joined: tuple[Stage, Pair, Operator],
) -> None:
    stage, pair, operator = joined
    stage.apply(far_away(pair))
    status = stage.wait_succeeded("far", deadline_s=2 * RUN_S)
    assert (status["step"], status["restarts"]) == (STEPS, 0), operator.tail()
    assert f"checkpoint step-{STEPS:08d}" in stage.assert_exact("far")
    stage.delete("rljobs", "far")
    stage.wait(lambda: stage.get("rljobs", "far") is None, "the job to go", operator, deadline_s=RUN_S)
    wait_gone(pair.there, "far", operator)


@pytest.mark.parametrize("generators", [1, 4, 8])
def test_one_copy_of_each_version_crosses_the_link_however_many_generators_take_it(
    joined: tuple[Stage, Pair, Operator], two_clusters: TwoClusters, *, generators: int
) -> None:
    stage, pair, operator = joined
    job = far_away(pair, replicas=generators, step_s=2.0)
    job["spec"]["trainer"]["engine"]["simulated"]["weightBytes"] = WEIGHT_BYTES
    stage.apply(job)
    _wait_generators(stage, generators)
    begun, before = stage.page("far")["step"], two_clusters.link.shape().there.bytes
    stage.wait_step("far", begun + COUNTED)
    ended, after = stage.page("far")["step"], two_clusters.link.shape().there.bytes
    copies = (after - before) / (WEIGHT_BYTES * (ended - begun))
    sys.stderr.write(f"{generators} generators: {copies:.2f} of a version's bytes over the link for each step\n")
    assert copies <= 1 + SLACK
    assert stage.wait_succeeded("far", deadline_s=2 * RUN_S)["restarts"] == 0, operator.tail()
    stage.assert_exact("far")


def test_training_goes_on_while_the_link_is_cut_and_lossy_and_the_member_comes_back_by_itself(
    joined: tuple[Stage, Pair, Operator], two_clusters: TwoClusters
) -> None:
    stage, pair, operator = joined
    stage.apply(near_and_far(simulated("far", step_s=1.0, steps=150), pair, replicas=2))
    _wait_generators(stage, 3)
    step = stage.page("far")["step"]
    two_clusters.link.cut()
    stage.wait_step("far", step + MINUTE)
    stage.wait_for(
        lambda: stage.condition("far", "ClusterUnreachable").get("status") == "True", "ClusterUnreachable", job="far"
    )
    assert [one["pool"] for one in stage.page("far")["generators"]] == ["near"]
    two_clusters.link.heal()
    _wait_generators(stage, 3)
    stage.wait_for(
        lambda: stage.condition("far", "ClusterUnreachable").get("status") == "False", "the member", job="far"
    )
    step = stage.page("far")["step"]
    two_clusters.link.lossy(0.05)
    stage.wait_step("far", step + MINUTE // 2)
    two_clusters.link.heal()
    pair.there.delete("pods", "far-away-0")  # it was first, so it takes versions over the link
    status = stage.wait_succeeded("far", deadline_s=2 * RUN_S)
    assert status["attempt"] == 1, operator.tail()
    stage.assert_exact("far")
    stage.delete("rljobs", "far")
    wait_gone(pair.there, "far", operator)


def test_two_jobs_of_one_port_behind_a_proxy_that_passes_tls_through_by_its_name(
    joined: tuple[Stage, Pair, Operator], two_clusters: TwoClusters, tmp_path: Path
) -> None:
    stage, pair, operator = joined
    hub = two_clusters.hub
    address = {"host": hub.addresses.wan, "schedulerPort": PROXY_PORT, "weightsPort": PROXY_PORT}
    hub.api.patch(pair.path, {"spec": {"exposure": {"nodePort": None, "address": address}}}).expect()
    jobs = ("far", "farther")
    for name in jobs:
        job = far_away(pair)
        job["metadata"]["name"] = name
        stage.apply(job)
    backends = {}
    for name in jobs:
        trainer = f"{names.trainer(name)}-0"
        stage.wait_for(lambda: stage.pods(name).get(trainer, {}).get("status", {}).get("podIP"), trainer, job=name)  # noqa: B023 - called at once
        ip = stage.pods(name)[trainer]["status"]["podIP"]
        uid = stage.uid(name)
        backends |= {
            names.tls_name("scheduler", uid=uid): f"{ip}:{names.PORT_GRPC}",
            names.tls_name("weights", uid=uid): f"{ip}:{names.PORT_WEIGHTS}",
        }
    with proxy(hub, backends, folder=tmp_path):
        for name in jobs:
            assert stage.wait_succeeded(name, deadline_s=2 * RUN_S)["step"] == STEPS, operator.tail()
            stage.assert_exact(name)


@contextmanager
def proxy(hub: NodeCluster, backends: Mapping[str, str], *, folder: Path) -> Iterator[None]:
    """HAProxy in the hub's network, which reads the name that a client sends and nothing else. `backends`: name -> address."""
    file = folder / "haproxy.cfg"
    lines = [f"backend {name}\n    server only {address}\n" for name, address in backends.items()]
    file.write_text(PROXY.format(host=hub.addresses.wan, port=PROXY_PORT) + "".join(lines))
    command = [*hub.settings.enter, "haproxy", "-db", "-f", file]
    server = Server("haproxy", command, log=folder / "haproxy.log", mark=hub.mark)
    server.start()
    try:
        yield
        assert server.pid is not None, server.log.read_text()
    finally:
        server.stop()


PROXY = """
defaults
    mode tcp
    timeout connect 10s
    timeout client 1h
    timeout server 1h
frontend tls
    bind {host}:{port}
    tcp-request inspect-delay 5s
    tcp-request content accept if {{ req.ssl_hello_type 1 }}
    use_backend %[req.ssl_sni]
"""


def test_a_model_learns_with_generators_in_both_clusters(joined: tuple[Stage, Pair, Operator]) -> None:
    stage, pair, operator = joined
    job = chain_sum(steps=20, evaluate_every=10)
    job["spec"]["model"]["scratch"]["warmUp"]["steps"] = 400
    stage.apply(chain_sum_code(stage.namespace), near_and_far(job, pair, replicas=1))
    status = stage.wait_succeeded("chain-sum", deadline_s=5 * RUN_S)
    rewards = stage.rewards("chain-sum")
    sys.stderr.write(f"held-out rewards: {rewards}\n")
    assert rewards[-1] > rewards[0] + 0.05
    assert status["restarts"] == 0, operator.tail()
    stage.assert_exact("chain-sum")


def far_trainer(pair: Pair, **changes: Any) -> dict[str, Any]:
    """A job of simulated engines with its trainer in the member, and a generator in each cluster."""
    job = near_and_far(simulated("far", **changes), pair, replicas=1)
    job["spec"]["trainer"]["clusterName"] = pair.name
    return job


def test_a_trainer_in_a_member_runs_to_its_end_with_generators_at_home_and_beside_it(
    joined: tuple[Stage, Pair, Operator], two_clusters: TwoClusters
) -> None:
    stage, pair, operator = joined
    there = Stage(two_clusters.member, pair.there.namespace)
    stage.apply(far_trainer(pair, steps=MINUTE, step_s=1.0))
    stage.wait_for(
        lambda: {one["pool"] for one in there.page("far").get("generators", ())} == {"near", "away"},
        "generators of both clusters",
        job="far",
        deadline_s=RUN_S,
    )
    status = stage.wait_succeeded("far", deadline_s=2 * RUN_S)
    assert (status["step"], status["restarts"], status["attempt"]) == (MINUTE, 0, 1), operator.tail()
    assert f"checkpoint step-{MINUTE:08d}" in stage.assert_exact("far", at=there)
    stage.delete("rljobs", "far")
    stage.wait(lambda: stage.get("rljobs", "far") is None, "the job to go", operator, deadline_s=RUN_S)
    wait_gone(pair.there, "far", operator)


def test_a_trainer_that_home_does_not_reach_trains_on_with_what_is_beside_it(
    joined: tuple[Stage, Pair, Operator], two_clusters: TwoClusters
) -> None:
    stage, pair, operator = joined
    there = Stage(two_clusters.member, pair.there.namespace)
    stage.apply(far_trainer(pair, steps=3 * MINUTE, step_s=1.0))
    stage.wait_for(
        lambda: len(there.page("far").get("generators", ())) == 2, "two generators", job="far", deadline_s=RUN_S
    )
    two_clusters.link.cut()
    stage.wait_for(
        lambda: stage.condition("far", "Ready").get("reason") == "ClusterUnreachable", "Ready Unknown", job="far"
    )
    step = there.page("far")["step"]
    stage.wait_for(lambda: there.page("far").get("step", 0) >= step + 10, "ten steps more", job="far")
    two_clusters.link.heal()
    stage.wait_for(lambda: stage.condition("far", "Ready").get("reason") == "Running", "the member", job="far")
    status = stage.wait_succeeded("far", deadline_s=2 * RUN_S)
    assert (status["attempt"], status["restarts"]) == (1, 0), operator.tail()
    stage.assert_exact("far", at=there)


def _wait_generators(stage: Stage, count: int) -> None:
    stage.wait_for(
        lambda: len(stage.page("far").get("generators", ())) == count,
        f"{count} generators",
        job="far",
        deadline_s=RUN_S,
    )
