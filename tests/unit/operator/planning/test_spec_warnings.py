"""The condition SpecWarnings: fields that do not go together, in a job that may start. Each warning: tests/corpus/good/gpus-doubtful.yaml."""

from typing import Any

from support.job_lives import conditions, edited, lived, message, reported
from support.observed_jobs import job_document, observed

KIND = "SpecWarnings"
POOL: dict[str, Any] = job_document()["spec"]["generators"][0] | {"engine": {"vllm": {"tensorParallelSize": 2}}}
TORCH = {"engine": {"torch": {}}}


def test_a_job_that_may_start_says_what_does_not_go_together_until_it_does() -> None:
    assert KIND not in conditions(reported(observed()))
    doubtful, decision = lived({}, start=edited(observed(), generators=[POOL], trainer=TORCH))
    assert conditions(decision)[KIND] == ("True", "WarningsFound")
    assert message(decision, KIND).startswith("spec.generators[0].pod.resources.limits: name no GPU")
    assert decision.wanted.trainers == 1, "nothing is refused for it"
    _, decision = lived({"job": None, "invalid": "a mistake"}, start=doubtful)
    assert conditions(decision)[KIND] == ("True", "WarningsFound"), "the last verdict stays"
    mended = POOL | {"pod": {"resources": {"limits": {"nvidia.com/gpu": 2}}}}
    _, decision = lived({}, start=edited(doubtful, generators=[mended], trainer=TORCH))
    assert conditions(decision)[KIND] == ("False", "NoWarnings")
