"""The pool of agents: who has the job's certificate in its pods, how far they reach, how many there are, and what Ready says of them."""

from dataclasses import replace
from typing import Any

import pytest

from streamrl import keys, names
from streamrl.spec import parse_job
from streamrl.status import RLJobStatus
from streamrl_operator.autoscaler import sessions
from streamrl_operator.autoscaler.sessions import SessionCounts
from streamrl_operator.autoscaler.values import ScalingState
from streamrl_operator.planning import replicas
from streamrl_operator.planning.certificates import roles_of
from streamrl_operator.planning.defaults import inherit, read_layers, write_layers
from streamrl_operator.planning.life import decide
from support.observed_jobs import SETTINGS, agents, all_ready, container, observed, page, with_agents
from support.planned import SETTINGS as PLANNING
from support.planned import agents_document, containers, find, planned
from support.restricted import violations

JOB = parse_job(agents_document())


def pod() -> dict[str, Any]:
    template: dict[str, Any] = find(planned(JOB), "StatefulSet", "full-agents")["spec"]["template"]
    return template


def of(name: str) -> dict[str, Any]:
    (found,) = (one for one in containers(pod()) if one["name"] == name)
    return found


def volumes(container: dict[str, Any]) -> set[str]:
    return {mount["name"] for mount in container["volumeMounts"]}


def variables(container: dict[str, Any]) -> set[str]:
    return {variable["name"] for variable in container["env"]}


def test_only_the_link_has_what_is_the_jobs() -> None:
    """A certificate and the job file; programs have what the job's owner gives them."""
    sources = {volume["name"]: volume for volume in pod()["spec"]["volumes"]}
    secret = {name for name, source in sources.items() if "secret" in source}
    assert secret == {"streamrl-tls"}
    assert volumes(of("agent-link")) >= {"streamrl-tls", "streamrl-job"}
    assert not volumes(of("agents")) & {"streamrl-tls", "streamrl-job", "streamrl-link-tmp"}
    assert keys.ENV_TLS_DIR not in variables(of("agents"))
    assert "HF_TOKEN" in variables(of("agents"))
    assert "HF_TOKEN" not in variables(of("agent-link"))
    assert not volumes(of("agent-link")) & {"data", "fast", "streamrl-code", "streamrl-tmp"}
    assert (of("agents")["image"], of("agent-link")["image"]) == (
        "registry.example/agents:3",
        "registry.example/trainer:7",
    )
    assert pod()["spec"]["automountServiceAccountToken"] is False
    assert "shareProcessNamespace" not in pod()["spec"]
    assert violations(pod()["spec"]) == []


def test_the_programs_container_starts_first_and_ends_last() -> None:
    """So what is played can be answered while the pod ends."""
    (first,) = pod()["spec"]["initContainers"]
    assert (first["name"], first["restartPolicy"]) == ("agents", "Always")
    assert [one["name"] for one in pod()["spec"]["containers"]] == ["agent-link"]


def test_a_policy_is_there_where_the_administrator_wants_policies() -> None:
    kinds = [each["kind"] for each in planned(JOB) if each["metadata"]["name"] == "full-agents"]
    assert "NetworkPolicy" in kinds
    plain = planned(JOB, settings=replace(PLANNING, isolates_jobs=False))
    assert "NetworkPolicy" not in {each["kind"] for each in plain}


def test_agents_have_a_leaf_of_their_own_where_there_are_any() -> None:
    assert roles_of(JOB) == ("scheduler", "trainer", "generator", "agents")
    document = agents_document()
    del document["spec"]["task"]["agent"]["pool"]
    assert names.AGENTS not in roles_of(parse_job(document))


def test_what_a_namespace_gives_all_pods_these_have_too() -> None:
    layers = read_layers(
        write_layers({"defaults": {"pod": {"nodeSelector": {"zone": "b"}}, "images": {"generator": "g"}}})
    )
    job, origins = inherit(JOB, layers)
    pool = job.spec.agent_pool
    assert pool is not None
    assert pool.pod.node_selector == {"gpu": "h200", "zone": "b"}
    assert pool.pod.image == "registry.example/agents:3"
    assert "spec.task.agent.pool.pod.nodeSelector.zone" in {one.field for one in origins}


AUTO = {"auto": {"initialReplicas": 2, "minReplicas": 1, "maxReplicas": 4, "cooldownSeconds": 60.0}}


@pytest.mark.parametrize(
    ("scaling", "counts", "wanted"),
    [
        ({"static": {"replicas": 3}}, None, 3),
        ({"external": {"initialReplicas": 2}}, None, 2),
        (AUTO, None, 2),
        (AUTO, {"sessions": 20, "waiting": 0, "places": 8}, 3),
        (AUTO, {"sessions": 16, "waiting": 40, "places": 8}, 4),
    ],
)
def test_how_many_pods_there_are(scaling: dict[str, Any], counts: dict[str, int] | None, wanted: int) -> None:
    seen = observed(spec={"task": with_agents(scaling=scaling)}, numbers=page(agents=counts))
    plans = {plan.name: plan for plan in replicas.plan(seen, before=RLJobStatus())}
    assert set(plans) == {"sim", "agents"}
    assert (plans["agents"].desired, plans["agents"].requested) == (wanted, wanted)


def test_a_pool_grows_at_once_and_shrinks_one_by_one_after_quiet_cooldowns() -> None:
    job = parse_job(agents_document())
    pool = job.spec.agent_pool
    assert pool is not None
    scaling = pool.scaling.model_copy(update={"auto": pool.scaling.auto})
    state, sizes = ScalingState(wanted=1), []
    course = [(0, 0), (1, 30), (2, 0), (50, 0), (61, 0), (70, 25), (100, 0), (129, 0), (131, 0), (192, 0), (300, 0)]
    for now_s, played in course:
        counts = SessionCounts(played=played, waiting=0, places=8)
        decision, state = sessions.decide(scaling, state=state, seen=counts, now_s=now_s)
        sizes.append(decision.replicas)
    assert sizes == [1, 4, 4, 4, 3, 4, 4, 4, 3, 2, 1]
    decision, _ = sessions.decide(scaling, state=state, seen=None, now_s=1000.0)
    assert decision.replicas == 1, "never down on missing data"


@pytest.mark.parametrize("bad", [None, {}, {"agents": None}, {"agents": {"sessions": "x"}}, {"agents": {"places": 0}}])
def test_numbers_that_are_none_change_nothing(bad: dict[str, Any] | None) -> None:
    assert sessions.observe(bad) is None


def ready(*pods: dict[str, Any]) -> tuple[str, str, str]:
    seen = observed(spec={"task": with_agents(scaling={"static": {"replicas": 2}})}, pods=[*all_ready(), *pods])
    (condition,) = [one for one in decide(seen, settings=SETTINGS).status["conditions"] if one["type"] == "Ready"]
    return condition["status"], condition["reason"], condition["message"]


def test_ready_needs_one_agent_host_and_tells_of_the_others() -> None:
    waiting = agents(1, ready=False, containers=[container("agent-link", waiting="ImagePullBackOff")])
    status, reason, message = ready(agents(0), waiting)
    assert (status, reason) == ("True", "Running")
    assert "1 of 2 agent hosts are ready; container agent-link of pod simulated-agents-1: image registry/x" in message
    status, reason, message = ready(waiting)
    assert (status, reason) == ("False", "ImagePullBackOff")
    assert message.startswith("0 of 2 agent hosts are ready")
    assert ready()[1] == "AgentsPending"
