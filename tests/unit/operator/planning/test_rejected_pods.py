"""The life of a job whose pods kubelets reject: nothing counts, and new pods of the set wait."""

from dataclasses import replace
from datetime import timedelta

from streamrl import names
from support.job_lives import conditions, edited, reported, running
from support.observed_jobs import JOB, all_ready, carried_out, generator


def test_new_pods_of_a_set_wait_while_kubelets_reject_them_and_no_longer() -> None:
    def rejected(time: int) -> dict:
        return generator(1, phase="Failed", reason="OutOfcpu", uid=f"u-{time}")

    look, ready = running(), all_ready(2)[:2]
    for time, held in ((0, frozenset()), (1, frozenset({f"{JOB}-sim"}))):
        decision = reported(replace(look, pods=[*ready, rejected(time)]))
        assert (conditions(decision)["Failed"], decision.status["restarts"]) == (("False", "InProgress"), 0)
        assert (decision.wanted.held, decision.delete_pods) == (held, ())
        look = carried_out(look, decision)
    assert decision.requeue_after_s == 10
    gated = generator(1, ready=False) | {"spec": {"schedulingGates": [{"name": names.GATE}]}}
    waiting = reported(replace(look, pods=[*ready, gated], now=look.now + timedelta(seconds=9)))
    assert (waiting.wanted.held, waiting.delete_pods) == (frozenset({f"{JOB}-sim"}), ())
    over = reported(replace(look, pods=[*ready, gated], now=look.now + timedelta(seconds=10)))
    assert (over.wanted.held, over.delete_pods) == (frozenset(), (f"{JOB}-sim-1",))


def test_a_job_that_has_ended_holds_no_set() -> None:
    look = running()
    for time in range(2):
        rejected = generator(1, phase="Failed", reason="OutOfcpu", uid=f"u-{time}")
        look = replace(look, pods=[*all_ready(1), rejected])
        decision = reported(look)
        look = carried_out(look, decision, seconds=1)
    assert decision.status["holds"]
    ended = reported(edited(look, activeDeadlineSeconds=1))
    assert conditions(ended)["Failed"] == ("True", "DeadlineExceeded")
    assert (ended.status.get("holds"), ended.wanted.held) == (None, frozenset())
