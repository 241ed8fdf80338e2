"""A pool of agents at a real API server: what is made for it, how it is scaled from outside, and that nothing of it stays."""

from typing import Any

import pytest

from cluster.operators import Lab, Operator
from streamrl import names
from support.jobs import simulated_job

pytestmark = pytest.mark.timeout(300)

JOB, POOL = "played", "played-agents"
OF_POOL = ("services", "networkpolicies", "poddisruptionbudgets", "statefulsets", "generatorpools")


def job() -> dict[str, Any]:
    document = simulated_job()
    document["metadata"]["name"] = JOB
    document["spec"]["task"] |= {
        "agent": {
            "command": ["python", "agent.py"],
            "pool": {
                "scaling": {"external": {"initialReplicas": 2}},
                "egress": [{"cidr": "0.0.0.0/0", "except": ["10.0.0.0/8"], "ports": [443]}],
                "pod": {"image": "registry.example/agents:1"},
            },
        },
        "rewards": [{"name": "game", "environment": {}}],
    }
    return document


def size(lab: Lab) -> int:
    return int((lab.get("statefulsets", POOL) or {"spec": {"replicas": 0}})["spec"]["replicas"])


def test_a_pool_of_agents_is_made_scaled_and_taken_away(lab: Lab, operator: Operator) -> None:
    lab.create("rljobs", job())
    lab.wait(lambda: all(POOL in lab.made(JOB)[plural] for plural in OF_POOL), f"the objects of {POOL}", operator)
    lab.wait(lambda: size(lab) == 2, "the first size", operator)
    assert f"{JOB}-tls-agents" in lab.made(JOB)["secrets"]
    pool = lab.must("generatorpools", POOL)
    assert (pool["spec"]["role"], pool["spec"]["poolName"], pool["spec"]["replicas"]) == ("agents", "agents", 2)
    (*_, allowed) = lab.must("networkpolicies", POOL)["spec"]["egress"]
    assert allowed["to"] == [{"ipBlock": {"cidr": "0.0.0.0/0", "except": ["10.0.0.0/8"]}}]
    lab.cluster.kubectl("--namespace", lab.namespace, "scale", f"generatorpool/{POOL}", "--replicas=5")
    lab.wait(lambda: size(lab) == 5, "the size from outside", operator)
    lab.wait_until_quiet(JOB, operator)
    status = lab.must("generatorpools", POOL)["status"]
    assert (status["desiredReplicas"], status["selector"]) == (5, f"{names.LABEL_JOB}={JOB},{names.LABEL_POOL}=agents")
    lab.delete("rljobs", JOB)
    lab.wait(lambda: lab.get("rljobs", JOB) is None, "the end of the job", operator)
    assert all(POOL not in found for found in lab.made(JOB).values())
