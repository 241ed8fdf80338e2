"""The life of a job: what is wanted, said and told at each look."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from streamrl import names
from streamrl.status import RLJobStatus
from streamrl_operator.planning.life import AUTO_LOOK_S, decide
from streamrl_operator.planning.progress import renewed
from streamrl_operator.planning.values import Observed, Verdict
from streamrl_workers.scheduler.shell.signal_pages import Numbers
from streamrl_workers.scheduler.shell.switchboard import Switchboard
from support.core_world import World, settings
from support.observed_jobs import (
    JOB,
    NOW,
    SETTINGS,
    all_ready,
    carried_out,
    container,
    generator,
    job_document,
    observed,
    page,
    pool_object,
    trainer,
    validated,
)

SUCCESS = page(
    step=20,
    ended=True,
    result={"status": "succeeded", "steps": 20, "final_reward": 0.87654321, "checkpoint": "checkpoints/step-00000020"},
)
FAILURE = page(ended=True, result={"status": "failed", "reason": "every group was dropped"})


def told(look: Observed) -> Verdict:
    """The verdict, whose statuses an API server would take."""
    return decide(look, settings=SETTINGS)


def conditions(verdict: Verdict) -> dict[str, tuple[str, str]]:
    return {one["type"]: (one["status"], one["reason"]) for one in verdict.status["conditions"]}


def message(verdict: Verdict, kind: str) -> str:
    return next(one["message"] for one in verdict.status["conditions"] if one["type"] == kind)


def reasons(verdict: Verdict) -> list[str]:
    return [event.reason for event in verdict.events]


def lived(*looks: dict[str, Any], start: Observed | None = None) -> tuple[Observed, Verdict]:
    """One look after the other, each with its changes, ten seconds apart."""
    now = start or observed()
    for changes in looks:
        now = replace(now, **changes)
        verdict = told(now)
        now = carried_out(now, verdict, seconds=10)
    return now, verdict


def edited(look: Observed, **spec: Any) -> Observed:
    """The same job with another spec, as after `kubectl edit`."""
    metadata = {**look.raw["metadata"], "generation": look.raw["metadata"]["generation"] + 1}
    document = {**look.raw, "spec": {**look.raw["spec"], **spec}, "metadata": metadata}
    return replace(look, raw=document, job=validated(document))


def running() -> Observed:
    return lived({"pods": all_ready()}, {"numbers": page()})[0]


def suspended() -> Observed:
    return lived({}, {"pods": ()}, start=edited(running(), suspend=True))[0]


# ---- starting


def test_at_the_first_visit_all_is_wanted_and_every_condition_is_set() -> None:
    verdict = told(observed())
    assert (verdict.wanted.trainers, verdict.wanted.generators) == (1, {"sim": 2})
    assert verdict.wanted.requested == {"sim": 2}
    assert conditions(verdict) == {
        "Ready": ("False", "TrainerPending"),
        "Suspended": ("False", "NotSuspended"),
        "Succeeded": ("False", "InProgress"),
        "Failed": ("False", "InProgress"),
    }
    assert verdict.status["startTime"] == "2026-01-01T12:00:00Z"
    assert (verdict.status["restarts"], verdict.status["ignoredRestarts"]) == (0, 0)
    assert reasons(verdict) == ["Started"]
    assert verdict.look_again_s == SETTINGS.resync_s


@pytest.mark.parametrize(
    ("pods", "status", "reason", "words"),
    [
        ([trainer(ready=False, unscheduled="0/1 nodes are available")], "False", "Unschedulable", "0/1 nodes"),
        ([trainer(ready=False, init=[container("prepare")])], "False", "Preparing", "makes the model ready"),
        ([trainer()], "False", "GeneratorsPending", "0 of 2 generators are ready"),
        (
            [trainer(), generator(ready=False, unscheduled="none")],
            "False",
            "Unschedulable",
            "simulated-sim-0 has no node",
        ),
        (
            [trainer(), generator(), generator(1, ready=False)],
            "True",
            "Running",
            "1 of 2 generators are ready; pod simulated-sim-1",
        ),
        (all_ready(), "True", "Running", "the trainer is ready; 2 of 2 generators are ready"),
        ([trainer(leaving=True), generator(), generator(1)], "False", "Terminating", "simulated-trainer-0"),
    ],
)
def test_ready_says_what_is_awaited(pods: list, status: str, reason: str, words: str) -> None:
    verdict = told(observed(pods=pods))
    assert conditions(verdict)["Ready"] == (status, reason)
    assert words in message(verdict, "Ready")


def test_without_an_asked_generator_it_says_so() -> None:
    pools = {"sim": pool_object(0, scaling="external")}
    verdict = told(observed(spec={"scaling": {"external": {}}}, pools=pools, pods=[trainer()]))
    assert conditions(verdict)["Ready"] == ("False", "NoGenerators")


def test_an_invalid_spec_makes_nothing_and_ends_nothing() -> None:
    verdict = told(observed(job=None, invalid="spec.seed must be at least 0, got -1"))
    assert conditions(verdict)["Ready"] == ("False", "InvalidSpec")
    assert message(verdict, "Ready") == "spec.seed must be at least 0, got -1"
    assert (verdict.wanted.trainers, verdict.wanted.generators, verdict.wanted.requested) == (0, {}, {})
    assert reasons(verdict) == ["InvalidSpec"]
    sets = {f"{JOB}-trainer": {"spec": {"replicas": 1}}, f"{JOB}-sim": {"spec": {"replicas": 2}}}
    while_it_runs = replace(running(), job=None, invalid="x", sets=sets)
    verdict = told(while_it_runs)
    assert (verdict.wanted.trainers, verdict.wanted.generators) == (1, {"sim": 2})
    assert reasons(told(carried_out(while_it_runs, verdict))) == []


def test_a_job_that_became_invalid_is_suspended_and_runs_out_all_the_same() -> None:
    sets = {f"{JOB}-trainer": {"spec": {"replicas": 1}}, f"{JOB}-sim": {"spec": {"replicas": 2}}}
    look = replace(edited(running(), activeDeadlineSeconds=60), job=None, invalid="x", sets=sets)
    assert told(look).wanted.any_pods
    halted = {**look.raw, "spec": {**look.raw["spec"], "suspend": True}}
    assert not told(replace(look, raw=halted)).wanted.any_pods
    late = told(replace(look, now=look.now + timedelta(seconds=61)))
    assert not late.wanted.any_pods
    assert conditions(late)["Failed"] == ("True", "DeadlineExceeded")


@pytest.mark.parametrize(("value", "keeps"), [("true", True), ("false", False), (None, False)])
def test_checkpoints_are_kept_by_an_annotation(value: str | None, keeps: bool) -> None:
    look = running()
    metadata = {**look.raw["metadata"], "annotations": {names.ANNOTATION_KEEP_CHECKPOINTS: value} if value else {}}
    assert told(replace(look, raw={**look.raw, "metadata": metadata})).wanted.keeps_checkpoints is keeps


@pytest.mark.parametrize("valid", [True, False])
def test_a_job_that_another_brings_about_is_left_alone(valid: bool) -> None:
    look = observed(spec={"managedBy": "kueue.x-k8s.io/multikueue"})
    verdict = told(look if valid else replace(look, job=None))
    assert not verdict.ours
    assert (verdict.wanted.trainers, verdict.status, verdict.pool_statuses, verdict.events) == (0, {}, {}, ())


# ---- running


def test_the_numbers_are_shown() -> None:
    status = told(observed(pods=all_ready(), numbers=page())).status
    assert {key: status[key] for key in ("step", "reward", "queue", "tokensPerSecond", "attempt")} == {
        "step": 3,
        "reward": 0.1235,
        "queue": 7,
        "tokensPerSecond": 1235.0,
        "attempt": 1,
    }
    # three generators and a trainer at the same cost: (3 * 0.3 + 0.6) / 4 and 3 * 0.1 / 4
    assert status["bubbles"] == {"pipelinePercent": 37.5, "skewPercent": 7.5}
    assert status["checkpointPath"] == f"{JOB}-u-job/checkpoints/step-00000002"
    assert status["pools"] == [{"name": "sim", "desired": 2, "ready": 2}]


def test_bubbles_are_weighed_by_cost() -> None:
    document = job_document()
    document["spec"]["generators"][0]["costPerHour"] = "2.00"
    document["spec"]["trainer"]["costPerHour"] = "6.00"
    status = told(observed(document, numbers=page())).status
    assert status["bubbles"] == {"pipelinePercent": 45.0, "skewPercent": 5.0}


def test_numbers_are_renewed_once_in_the_resync_time_and_only_if_they_differ() -> None:
    look = running()
    steps = []
    for second in range(0, 100, 10):
        look = replace(look, numbers=page(step=10 + second))
        verdict = told(look)
        steps.append(verdict.status["step"])
        look = carried_out(look, verdict, seconds=10)
    assert steps == [3, 3, 30, 30, 30, 60, 60, 60, 90, 90]
    before = look.raw["status"]
    still = told(replace(look, numbers=page(step=90), now=look.now + timedelta(hours=1)))
    assert still.status == before


@pytest.mark.parametrize(
    "broken",
    [None, {}, {"step": "x", "scaling": [], "queue": -1}, page(last_evaluation=None, queue=float("nan"), step=True)],
)
def test_a_page_that_is_missing_or_broken_takes_nothing_away(broken: dict | None) -> None:
    look = running()
    later = told(replace(look, numbers=broken, now=look.now + timedelta(hours=1)))
    shown = ("step", "reward", "queue", "attempt", "tokensPerSecond", "bubbles")
    assert {key: later.status[key] for key in shown} == {key: look.raw["status"][key] for key in shown}


def test_the_page_of_a_real_scheduler_is_understood(tmp_path: Path) -> None:
    world = World(settings(steps=2, evaluation_prompts=0))
    numbers = Numbers(world.core, switchboard=Switchboard(), run_dir=tmp_path)
    world.run_out()
    numbers.observe()
    status = renewed(
        RLJobStatus(), numbers.numbers(), spec=validated(job_document()).spec, store=JOB, now=NOW, resync_s=30
    )
    numbers.close()
    assert (status.step, status.queue) == (2, 0)
    assert status.attempt == 1


def test_a_pool_that_scales_itself_is_looked_at_often() -> None:
    verdict = told(observed(spec={"scaling": {"auto": {"maxReplicas": 4}}}))
    assert verdict.look_again_s == AUTO_LOOK_S


def test_the_stamp_of_a_restart_is_passed_on() -> None:
    document = job_document()
    document["metadata"]["annotations"] = {names.ANNOTATION_ATTEMPT: "t1"}
    assert told(observed(document)).wanted.restarted_at == "t1"


# ---- suspend


def test_suspend_waits_for_the_pods_and_keeps_what_is_asked() -> None:
    look = edited(running(), suspend=True)
    verdict = told(look)
    assert (verdict.wanted.trainers, verdict.wanted.generators, verdict.wanted.requested) == (0, {"sim": 0}, {})
    assert conditions(verdict)["Suspended"] == ("False", "Suspending")
    assert "startTime" not in verdict.status
    assert "queue" not in verdict.status
    assert reasons(verdict) == []
    look = replace(carried_out(look, verdict), pods=())
    verdict = told(look)
    assert conditions(verdict)["Suspended"] == ("True", "Suspended")
    assert conditions(verdict)["Ready"] == ("False", "Suspended")
    assert reasons(verdict) == ["Suspended"]
    assert verdict.pool_statuses["sim"]["desiredReplicas"] == 0
    assert verdict.status["step"] == 3


def test_resume_starts_the_clock_again() -> None:
    look = edited(suspended(), suspend=False)
    verdict = told(look)
    assert (verdict.wanted.trainers, verdict.wanted.generators) == (1, {"sim": 2})
    assert reasons(verdict) == ["Resumed"]
    assert verdict.status["startTime"] == look.now.strftime("%Y-%m-%dT%H:%M:%SZ")
    assert conditions(verdict)["Suspended"] == ("False", "NotSuspended")


def test_the_ends_of_suspended_pods_are_no_failures_then_or_later() -> None:
    killed = [
        trainer(leaving=True, containers=[container("trainer", code=143)]),
        generator(containers=[container("generator", code=2)]),
    ]
    look, verdict = lived({"pods": killed}, start=edited(running(), suspend=True))
    assert verdict.status["restarts"] == 0
    look = edited(look, suspend=False)
    verdict = told(look)
    assert (verdict.status["restarts"], verdict.status["ignoredRestarts"]) == (0, 0)
    assert conditions(verdict)["Failed"] == ("False", "InProgress")


def test_a_job_made_suspended_has_its_pools_asked_for() -> None:
    verdict = told(observed(spec={"suspend": True}))
    assert (verdict.wanted.trainers, verdict.wanted.generators) == (0, {"sim": 0})
    assert verdict.wanted.requested == {"sim": 2}
    assert conditions(verdict)["Suspended"] == ("True", "Suspended")


# ---- ends


def test_success() -> None:
    verdict = told(replace(running(), numbers=SUCCESS))
    assert conditions(verdict) == {
        "Ready": ("False", "Completed"),
        "Suspended": ("False", "NotSuspended"),
        "Succeeded": ("True", "Completed"),
        "Failed": ("False", "Completed"),
    }
    assert message(verdict, "Succeeded") == "20 steps are done; held-out reward 0.8765"
    assert (verdict.wanted.trainers, verdict.wanted.generators) == (0, {"sim": 0})
    status = verdict.status
    assert (status["step"], status["reward"]) == (20, 0.8765)
    assert status["checkpointPath"] == f"{JOB}-u-job/checkpoints/step-00000020"
    assert status["completionTime"] == "2026-01-01T12:00:20Z"
    assert ("queue" in status, "tokensPerSecond" in status) == (False, False)
    assert reasons(verdict) == ["Succeeded"]


def test_a_result_counts_in_a_suspended_job_too() -> None:
    assert conditions(told(replace(suspended(), numbers=SUCCESS)))["Succeeded"] == ("True", "Completed")


CRASHES = [
    trainer(containers=[container("trainer", code=1)]),
    *(generator(n, containers=[container("generator", code=9, message="oh")]) for n in range(3)),
]


@pytest.mark.parametrize(
    ("changes", "reason", "words", "events"),
    [
        ({"numbers": FAILURE}, "RunFailed", "every group was dropped", ["Failed"]),
        (
            {"pods": [trainer(init=[container("prepare", code=2, message="model x: no such directory")])]},
            "UserError",
            "container prepare of pod simulated-trainer-0 ended with exit code 2 (Error): model x: no such directory",
            ["PodFailed", "Failed"],
        ),
        (
            {"pods": CRASHES},
            "TooManyRestarts",
            "4 restarts, and failurePolicy.maxRestarts is 3; the last: container generator of pod simulated-sim-2",
            ["PodFailed"] * 4 + ["Failed"],
        ),
    ],
)
def test_failures(changes: dict, reason: str, words: str, events: list[str]) -> None:
    verdict = told(replace(running(), **changes))
    assert conditions(verdict)["Failed"] == ("True", reason)
    assert conditions(verdict)["Succeeded"] == ("False", reason)
    assert words in message(verdict, "Failed")
    assert reasons(verdict) == events
    assert (verdict.wanted.trainers, verdict.wanted.generators) == (0, {"sim": 0})
    assert verdict.status["step"] == 3


def test_a_reason_of_any_length_fits() -> None:
    verdict = told(replace(running(), numbers=page(result={"status": "failed", "reason": "x" * 99_999})))
    assert len(message(verdict, "Failed")) == 1024
    assert len(verdict.events[0].message) == 1024


def test_a_rule_that_fails_the_job_is_named() -> None:
    rules = [{"name": "no-oom", "onReasons": ["OOMKilled"], "action": "FailJob"}]
    look = edited(running(), failurePolicy={"rules": rules})
    verdict = told(replace(look, pods=[trainer(containers=[container("trainer", code=137, reason="OOMKilled")])]))
    assert conditions(verdict)["Failed"] == ("True", "FailurePolicy")
    assert message(verdict, "Failed").startswith("rule no-oom of failurePolicy: container trainer")


def test_three_restarts_of_three_go_on() -> None:
    verdict = told(replace(running(), pods=CRASHES[:3]))
    assert conditions(verdict)["Failed"] == ("False", "InProgress")
    assert verdict.status["restarts"] == 3


def test_a_preempted_trainer_is_told_and_not_counted() -> None:
    verdict = told(replace(running(), pods=[trainer(disruption="PreemptionByScheduler", leaving=True)]))
    assert (verdict.status["restarts"], verdict.status["ignoredRestarts"]) == (0, 1)
    assert [(event.kind, event.reason) for event in verdict.events] == [("Normal", "PodFailed")]


def test_the_deadline() -> None:
    look = edited(running(), activeDeadlineSeconds=60)  # begun 20 s ago
    verdict = told(look)
    assert (conditions(verdict)["Failed"], verdict.look_again_s) == (("False", "InProgress"), SETTINGS.resync_s)
    assert told(replace(look, now=NOW + timedelta(seconds=50))).look_again_s == 10
    verdict = told(replace(look, now=NOW + timedelta(seconds=60)))
    assert conditions(verdict)["Failed"] == ("True", "DeadlineExceeded")
    assert reasons(verdict) == ["DeadlineExceeded"]


def test_the_deadline_stands_while_suspended_and_begins_again() -> None:
    look = edited(suspended(), activeDeadlineSeconds=60)
    later = replace(look, now=NOW + timedelta(hours=5))
    assert conditions(told(later))["Failed"] == ("False", "InProgress")
    resumed = edited(later, suspend=False)
    verdict = told(resumed)
    assert conditions(verdict)["Failed"] == ("False", "InProgress")
    late = replace(carried_out(resumed, verdict), now=resumed.now + timedelta(seconds=60))
    assert conditions(told(late))["Failed"] == ("True", "DeadlineExceeded")


@pytest.mark.parametrize("page_of_the_end", [SUCCESS, FAILURE])
def test_edits_after_the_end_change_nothing(page_of_the_end: dict) -> None:
    ended, first = lived({"numbers": page_of_the_end}, {"pods": ()}, start=running())
    scaling = [{**ended.raw["spec"]["generators"][0], "scaling": {"static": {"replicas": 9}}}]
    for changes in ({"suspend": True}, {"generators": scaling}, {"activeDeadlineSeconds": 1}):
        for numbers in (None, SUCCESS, FAILURE, page()):
            verdict = told(replace(edited(ended, **changes), numbers=numbers, pods=CRASHES))
            assert conditions(verdict) == conditions(first)
            assert (verdict.wanted.trainers, verdict.wanted.generators) == (0, {"sim": 0})
            assert (verdict.wanted.requested, verdict.events, verdict.delete_pods) == ({}, (), ())
            kept = {key: value for key, value in first.status.items() if key not in ("observedGeneration", "pools")}
            assert {key: verdict.status.get(key) for key in kept} == kept


def test_an_end_whose_spec_is_no_longer_valid_stays() -> None:
    ended, first = lived({"numbers": SUCCESS}, start=running())
    verdict = told(replace(ended, job=None, invalid="x"))
    assert conditions(verdict) == conditions(first)
    assert verdict.wanted.generators == {"sim": 0}


def test_time_to_live_after_the_end() -> None:
    ended, first = lived({"numbers": SUCCESS}, start=edited(running(), ttlSecondsAfterFinished=100))
    assert (first.look_again_s, first.delete_job) == (100.0, False)
    verdict = told(ended)
    assert (verdict.look_again_s, verdict.delete_job) == (90.0, False)
    late = replace(ended, now=ended.now + timedelta(seconds=90))
    assert told(late).delete_job
    metadata = {**late.raw["metadata"], "deletionTimestamp": "2026-01-01T13:00:00Z"}
    assert not told(replace(late, raw={**late.raw, "metadata": metadata})).delete_job
    forever, _ = lived({"numbers": SUCCESS}, start=running())
    assert told(replace(forever, now=NOW + timedelta(days=400))).delete_job is False


def test_a_job_that_is_being_deleted_wants_no_pods() -> None:
    look = running()
    metadata = {**look.raw["metadata"], "deletionTimestamp": "2026-01-01T13:00:00Z"}
    verdict = told(replace(look, raw={**look.raw, "metadata": metadata}))
    assert (verdict.wanted.trainers, verdict.wanted.generators, verdict.wanted.requested) == (0, {"sim": 0}, {})
    assert conditions(verdict)["Ready"] == ("False", "Deleting")
    assert (verdict.status["step"], verdict.events) == (3, ())
