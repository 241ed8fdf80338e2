"""The life of a job: what is wanted, said and told at each look."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from streamrl import names
from streamrl.status import RLJobStatus
from streamrl_operator.planning.conditions import CONDITIONS, Aspect
from streamrl_operator.planning.job_status import with_progress
from streamrl_operator.planning.life import AUTO_RECONCILE_S
from streamrl_operator.planning.pods import last_word
from streamrl_operator.planning.termination import with_blocked_condition
from streamrl_operator.planning.values import Observed
from streamrl_workers.scheduler.server.connections import Connections
from streamrl_workers.scheduler.server.status_endpoint import StatusEndpoint
from support.core_world import World, settings
from support.job_lives import conditions, edited, lived, message, reasons, reported, running
from support.jobs import parsed_job
from support.observed_jobs import (
    JOB,
    NOW,
    SETTINGS,
    all_ready,
    carried_out,
    container,
    generator,
    generator_whose,
    job_document,
    observed,
    page,
    pool_object,
    trainer,
    trainer_whose,
    validated,
)

SUCCESS = page(
    step=20,
    ended=True,
    result={"status": "succeeded", "steps": 20, "final_reward": 0.87654321, "checkpoint": "checkpoints/step-00000020"},
)
FAILURE = page(ended=True, result={"status": "failed", "reason": "every group was dropped"})


def suspended() -> Observed:
    return lived({}, {"pods": ()}, start=edited(running(), suspend=True))[0]


# ---- starting


def test_at_the_first_visit_the_trainer_is_wanted_and_every_condition_is_set() -> None:
    decision = reported(observed())
    assert (decision.wanted.trainers, decision.wanted.generators) == (1, {"sim": 0})
    assert decision.wanted.requested == {"sim": 2}
    assert conditions(decision) == {
        "Ready": ("False", "TrainerPending"),
        "Suspended": ("False", "NotSuspended"),
        "Succeeded": ("False", "InProgress"),
        "Failed": ("False", "InProgress"),
        "Reconciling": ("True", "TrainerPending"),
        "Stalled": ("False", "TrainerPending"),
    }
    assert decision.status["startTime"] == "2026-01-01T12:00:00Z"
    assert (decision.status["restarts"], decision.status["ignoredRestarts"]) == (0, 0)
    assert reasons(decision) == ["Started"]
    assert decision.requeue_after_s == SETTINGS.resync_s


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
    decision = reported(observed(pods=pods))
    assert conditions(decision)["Ready"] == (status, reason)
    assert words in message(decision, "Ready")


def test_without_an_asked_generator_it_says_so() -> None:
    pools = {"sim": pool_object(0, scaling="external")}
    decision = reported(observed(spec={"scaling": {"external": {}}}, pools=pools, pods=[trainer()]))
    assert conditions(decision)["Ready"] == ("False", "NoGenerators")


def test_an_invalid_spec_makes_nothing_and_ends_nothing() -> None:
    decision = reported(observed(job=None, invalid="spec.seed must be at least 0, got -1"))
    assert conditions(decision)["Ready"] == ("False", "InvalidSpec")
    assert message(decision, "Ready") == "spec.seed must be at least 0, got -1"
    assert (decision.wanted.trainers, decision.wanted.generators, decision.wanted.requested) == (0, {}, {})
    assert reasons(decision) == ["InvalidSpec"]
    sets = {f"{JOB}-trainer": {"spec": {"replicas": 1}}, f"{JOB}-sim": {"spec": {"replicas": 2}}}
    while_it_runs = replace(running(), job=None, invalid="x", sets=sets)
    decision = reported(while_it_runs)
    assert (decision.wanted.trainers, decision.wanted.generators) == (1, {"sim": 2})
    assert reasons(reported(carried_out(while_it_runs, decision))) == []


def test_a_job_that_became_invalid_is_suspended_and_runs_out_all_the_same() -> None:
    sets = {f"{JOB}-trainer": {"spec": {"replicas": 1}}, f"{JOB}-sim": {"spec": {"replicas": 2}}}
    look = replace(edited(running(), activeDeadlineSeconds=60), job=None, invalid="x", sets=sets)
    assert reported(look).wanted.any_pods
    halted = {**look.raw, "spec": {**look.raw["spec"], "suspend": True}}
    assert not reported(replace(look, raw=halted)).wanted.any_pods
    late = reported(replace(look, now=look.now + timedelta(seconds=61)))
    assert not late.wanted.any_pods
    assert conditions(late)["Failed"] == ("True", "DeadlineExceeded")


@pytest.mark.parametrize(("value", "keeps"), [("true", True), ("false", False), (None, False)])
def test_checkpoints_are_kept_by_an_annotation(value: str | None, keeps: bool) -> None:
    look = running()
    metadata = {**look.raw["metadata"], "annotations": {names.ANNOTATION_KEEP_CHECKPOINTS: value} if value else {}}
    assert reported(replace(look, raw={**look.raw, "metadata": metadata})).wanted.keeps_checkpoints is keeps


# ---- running


def test_the_numbers_are_shown() -> None:
    status = reported(observed(pods=all_ready(), numbers=page())).status
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
    status = reported(observed(document, numbers=page())).status
    assert status["bubbles"] == {"pipelinePercent": 45.0, "skewPercent": 5.0}


def test_numbers_are_renewed_once_in_the_resync_time_and_only_if_they_differ() -> None:
    look = running()
    steps = []
    for second in range(0, 100, 10):
        look = replace(look, numbers=page(step=10 + second))
        decision = reported(look)
        steps.append(decision.status["step"])
        look = carried_out(look, decision, seconds=10)
    assert steps == [3, 3, 30, 30, 30, 60, 60, 60, 90, 90]
    before = look.raw["status"]
    still = reported(replace(look, numbers=page(step=90), now=look.now + timedelta(hours=1)))
    assert still.status == before


@pytest.mark.parametrize(
    "broken",
    [None, {}, {"step": "x", "scaling": [], "queue": -1}, page(last_evaluation=None, queue=float("nan"), step=True)],
)
def test_a_page_that_is_missing_or_broken_takes_nothing_away(broken: dict | None) -> None:
    look = running()
    later = reported(replace(look, numbers=broken, now=look.now + timedelta(hours=1)))
    shown = ("step", "reward", "queue", "attempt", "tokensPerSecond", "bubbles")
    assert {key: later.status[key] for key in shown} == {key: look.raw["status"][key] for key in shown}


DIFF = "TrainInferLogprobDiffHigh"


def warned(message: str) -> dict[str, Any]:
    return page(warnings=[{"type": "SequencesClipped", "message": "n"}, {"type": DIFF, "message": message}])


def test_a_log_prob_difference_is_a_condition_that_says_what_to_do() -> None:
    look = running()
    assert DIFF not in conditions(reported(look)), "the page of an earlier release does not speak of it"
    within, decision = lived({"numbers": page(warnings=[])}, start=look)
    assert conditions(decision)[DIFF] == ("False", "WithinBound")
    above, decision = lived({"numbers": warned("0.2 is above 0.05; set this")}, start=within)
    assert conditions(decision)[DIFF] == ("True", "AboveBound")
    assert message(decision, DIFF) == "0.2 is above 0.05; set this"
    assert conditions(decision)["Ready"] == ("True", "Running"), "the job goes on"
    _, decision = lived({"numbers": warned("0.3 is above 0.05; set this")}, start=above)
    assert decision.status["conditions"] == above.raw["status"]["conditions"], "another figure is no write"
    _, decision = lived({"numbers": page(warnings=[])}, start=above)
    assert (conditions(decision)[DIFF], message(decision, DIFF)) == (("False", "WithinBound"), "")


@pytest.mark.parametrize("changes", [{"numbers": None}, {"numbers": page()}, {"numbers": SUCCESS}, {"job": None}])
def test_what_was_said_of_a_log_prob_difference_stays_without_news(changes: dict[str, Any]) -> None:
    above, before = lived({"numbers": warned("0.2 is above 0.05")}, start=running())
    _, decision = lived(changes, {"pods": ()}, start=above)
    assert conditions(decision)[DIFF] == conditions(before)[DIFF] == ("True", "AboveBound")


def test_a_blocked_job_goes_on_saying_it() -> None:
    above, before = lived({"numbers": warned("0.2 is above 0.05")}, start=running())
    blocked = Aspect(type="Ready", holds=False, reason="Refused", message="forbidden")
    status = with_blocked_condition(above.raw, blocked, status=before.status, now=above.now)
    assert [one["reason"] for one in status["conditions"]][4] == "AboveBound"
    assert status["conditions"][0]["reason"] == "Refused"


@pytest.mark.parametrize(
    "warnings",
    [{}, "many", [3, None, {"type": DIFF}], [{"type": DIFF, "message": 7}], [{"type": "ProcessFrozen", "message": 7}]],
)
def test_warnings_of_odd_shape_break_nothing(warnings: object) -> None:
    _, decision = lived({"numbers": page(warnings=warnings)}, start=running())
    assert conditions(decision)["Ready"] == ("True", "Running")


def test_the_page_of_a_real_scheduler_is_understood(tmp_path: Path) -> None:
    world = World(settings(steps=2, evaluation_prompts=0))
    numbers = StatusEndpoint(world.core, job=parsed_job(), connections=Connections(), run_dir=tmp_path)
    world.run_out()
    numbers.observe()
    status = with_progress(
        RLJobStatus(), numbers.status(), spec=validated(job_document()).spec, store=JOB, now=NOW, every_s=30
    )
    numbers.close()
    assert (status.step, status.queue) == (2, 0)
    assert status.attempt == 1


def test_a_pool_that_scales_itself_is_looked_at_often() -> None:
    decision = reported(observed(spec={"scaling": {"auto": {"maxReplicas": 4}}}, pods=[trainer()]))
    assert decision.requeue_after_s == AUTO_RECONCILE_S


def test_the_stamp_of_a_restart_is_passed_on() -> None:
    document = job_document()
    document["metadata"]["annotations"] = {names.ANNOTATION_ATTEMPT: "t1"}
    assert reported(observed(document)).wanted.restarted_at == "t1"


# ---- suspend


def test_suspend_waits_for_the_pods_and_keeps_what_is_asked() -> None:
    look = edited(running(), suspend=True)
    decision = reported(look)
    assert (decision.wanted.trainers, decision.wanted.generators, decision.wanted.requested) == (0, {"sim": 0}, {})
    assert conditions(decision)["Suspended"] == ("False", "Suspending")
    assert "startTime" not in decision.status
    assert "queue" not in decision.status
    assert reasons(decision) == []
    look = replace(carried_out(look, decision), pods=())
    decision = reported(look)
    assert conditions(decision)["Suspended"] == ("True", "Suspended")
    assert conditions(decision)["Ready"] == ("False", "Suspended")
    assert reasons(decision) == ["Suspended"]
    assert decision.pool_statuses["sim"]["desiredReplicas"] == 0
    assert decision.status["step"] == 3


def test_resume_starts_the_clock_again() -> None:
    look = edited(suspended(), suspend=False)
    decision = reported(look)
    assert (decision.wanted.trainers, decision.wanted.generators) == (1, {"sim": 0})
    assert reasons(decision) == ["Resumed"]
    assert decision.status["startTime"] == look.now.strftime("%Y-%m-%dT%H:%M:%SZ")
    assert conditions(decision)["Suspended"] == ("False", "NotSuspended")


def test_the_ends_of_suspended_pods_are_no_failures_then_or_later() -> None:
    killed = [
        trainer(leaving=True, containers=[container("trainer", code=143)]),
        generator_whose(code=2),
    ]
    look, decision = lived({"pods": killed}, start=edited(running(), suspend=True))
    assert decision.status["restarts"] == 0
    look = edited(look, suspend=False)
    decision = reported(look)
    assert (decision.status["restarts"], decision.status["ignoredRestarts"]) == (0, 0)
    assert conditions(decision)["Failed"] == ("False", "InProgress")


def test_a_change_that_workers_read_waits_until_no_pod_has_read_the_old_one() -> None:
    """Somebody suspended the job, changed it and let it go on before a look was taken: every pod is made again all the same."""
    look = edited(running(), pipeline={**job_document()["spec"]["pipeline"], "steps": 99})
    decision = reported(look)
    assert (decision.stops_first, decision.wanted.any_pods) == (True, False)
    assert conditions(decision)["Suspended"] == ("False", "Suspending")
    assert message(decision, "Ready").startswith("the spec was changed, all pods are made again: waits for 3 pods")
    asked = {f"{JOB}-trainer": {"spec": {"replicas": 1}}}
    look = replace(carried_out(look, decision), pods=(), sets=asked)
    assert reported(look).stops_first, "a pod that is asked for may come"
    look, decision = lived({"sets": {}}, start=look)
    assert (decision.stops_first, decision.wanted.trainers) == (False, 1)
    assert reasons(decision) == ["Resumed"]
    look, decision = lived({"pods": all_ready(), "sets": asked}, start=look)
    assert conditions(decision)["Ready"] == ("True", "Running")


def test_a_change_that_no_worker_reads_waits_for_nothing() -> None:
    look = edited(running(), trainer={**job_document()["spec"]["trainer"], "pod": {"image": "other"}})
    assert not reported(look).stops_first
    assert reported(look).wanted.trainers == 1


def test_a_job_made_suspended_has_its_pools_asked_for() -> None:
    decision = reported(observed(spec={"suspend": True}))
    assert (decision.wanted.trainers, decision.wanted.generators) == (0, {"sim": 0})
    assert decision.wanted.requested == {"sim": 2}
    assert conditions(decision)["Suspended"] == ("True", "Suspended")


# ---- ends


@pytest.mark.parametrize(
    ("look", "state", "reconciling", "stalled"),
    [
        (observed(), "TrainerPending", "True", "False"),
        (running(), "Running", "True", "False"),
        (suspended(), "Suspended", "False", "False"),
        (edited(running(), suspend=True), "Suspending", "True", "False"),
        (replace(running(), job=None, invalid="spec is wrong"), "InvalidSpec", "False", "True"),
        (replace(running(), numbers=SUCCESS), "Succeeded", "False", "False"),
        (replace(running(), numbers=FAILURE), "Failed", "False", "True"),
    ],
)
def test_what_tools_read_of_every_kind(look: Observed, state: str, reconciling: str, stalled: str) -> None:
    decision = reported(look)
    found = conditions(decision)
    assert (decision.status["state"], found["Reconciling"][0], found["Stalled"][0]) == (state, reconciling, stalled)


def test_what_only_a_person_clears_is_stalled() -> None:
    look, before = lived({}, start=running())
    verdicts = {
        "NameTaken": "True",
        "DataChanged": "True",
        "Refused": "False",
        "ServerError": "False",
        "ObjectMissing": "False",
    }
    for reason, stalled in verdicts.items():
        blocked = Aspect(type="Ready", holds=False, reason=reason, message="in the way")
        status = with_blocked_condition(look.raw, blocked, status=before.status, now=look.now)
        found = {one["type"]: one for one in status["conditions"]}
        assert (status["state"], found["Stalled"]["status"]) == (reason, stalled)
        assert found["Reconciling"]["status"] != stalled


def test_what_is_in_the_way_leaves_the_warnings() -> None:
    look, before = lived({}, start=running())
    one = before.status["conditions"][0]
    warned = [{**one, "type": kind} for kind in CONDITIONS.keys() - conditions(before).keys()]
    status = {**before.status, "conditions": [*before.status["conditions"], *warned]}
    blocked = Aspect(type="Ready", holds=False, reason="Refused", message="in the way")
    after = with_blocked_condition(look.raw, blocked, status=status, now=look.now)
    assert {each["type"] for each in after["conditions"]} == CONDITIONS.keys()


def test_success() -> None:
    decision = reported(replace(running(), numbers=SUCCESS))
    assert conditions(decision) == {
        "Ready": ("True", "Completed"),
        "Suspended": ("False", "NotSuspended"),
        "Succeeded": ("True", "Completed"),
        "Failed": ("False", "Completed"),
        "Reconciling": ("False", "Completed"),
        "Stalled": ("False", "Completed"),
    }
    assert message(decision, "Succeeded") == "20 steps are done; held-out reward 0.8765"
    assert (decision.wanted.trainers, decision.wanted.generators) == (0, {"sim": 0})
    status = decision.status
    assert (status["step"], status["reward"]) == (20, 0.8765)
    assert status["checkpointPath"] == f"{JOB}-u-job/checkpoints/step-00000020"
    assert status["completionTime"] == "2026-01-01T12:00:20Z"
    assert ("queue" in status, "tokensPerSecond" in status) == (False, False)
    assert reasons(decision) == ["Succeeded"]


def test_a_result_counts_in_a_suspended_job_too() -> None:
    assert conditions(reported(replace(suspended(), numbers=SUCCESS)))["Succeeded"] == ("True", "Completed")


CRASHES = [
    trainer_whose(code=1),
    *(generator_whose(n, code=9, message="oh") for n in range(3)),
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
    decision = reported(replace(running(), **changes))
    assert conditions(decision)["Failed"] == ("True", reason)
    assert conditions(decision)["Succeeded"] == ("False", reason)
    assert words in message(decision, "Failed")
    assert reasons(decision) == events
    assert (decision.wanted.trainers, decision.wanted.generators) == (0, {"sim": 0})
    assert decision.status["step"] == 3


def test_a_reason_of_any_length_fits() -> None:
    decision = reported(replace(running(), numbers=page(result={"status": "failed", "reason": "x" * 99_999})))
    assert len(message(decision, "Failed")) == 1024
    assert len(decision.events[0].message) == 1024


def test_a_rule_that_fails_the_job_is_named() -> None:
    rules = [{"name": "no-oom", "onReasons": ["OOMKilled"], "action": "FailJob"}]
    look = edited(running(), failurePolicy={"rules": rules})
    decision = reported(replace(look, pods=[trainer_whose(code=137, reason="OOMKilled")]))
    assert conditions(decision)["Failed"] == ("True", "FailurePolicy")
    assert message(decision, "Failed").startswith("rule no-oom of failurePolicy: container trainer")


def test_three_restarts_of_three_go_on() -> None:
    decision = reported(replace(running(), pods=CRASHES[:3]))
    assert conditions(decision)["Failed"] == ("False", "InProgress")
    assert decision.status["restarts"] == 3


def test_a_preempted_trainer_is_told_and_not_counted() -> None:
    decision = reported(replace(running(), pods=[trainer(disruption="PreemptionByScheduler", leaving=True)]))
    assert (decision.status["restarts"], decision.status["ignoredRestarts"]) == (0, 1)
    assert [(event.kind, event.reason) for event in decision.events] == [("Normal", "PodFailed")]


def test_the_deadline() -> None:
    look = edited(running(), activeDeadlineSeconds=60)  # begun 20 s ago
    decision = reported(look)
    assert (conditions(decision)["Failed"], decision.requeue_after_s) == (("False", "InProgress"), SETTINGS.resync_s)
    assert reported(replace(look, now=NOW + timedelta(seconds=50))).requeue_after_s == 10
    decision = reported(replace(look, now=NOW + timedelta(seconds=60)))
    assert conditions(decision)["Failed"] == ("True", "DeadlineExceeded")
    assert reasons(decision) == ["DeadlineExceeded"]


def test_the_deadline_stands_while_suspended_and_begins_again() -> None:
    look = edited(suspended(), activeDeadlineSeconds=60)
    later = replace(look, now=NOW + timedelta(hours=5))
    assert conditions(reported(later))["Failed"] == ("False", "InProgress")
    resumed = edited(later, suspend=False)
    decision = reported(resumed)
    assert conditions(decision)["Failed"] == ("False", "InProgress")
    late = replace(carried_out(resumed, decision), now=resumed.now + timedelta(seconds=60))
    assert conditions(reported(late))["Failed"] == ("True", "DeadlineExceeded")


@pytest.mark.parametrize("page_of_the_end", [SUCCESS, FAILURE])
def test_edits_after_the_end_change_nothing(page_of_the_end: dict) -> None:
    ended, first = lived({"numbers": page_of_the_end}, {"pods": ()}, start=running())
    scaling = [{**ended.raw["spec"]["generators"][0], "scaling": {"static": {"replicas": 9}}}]
    for changes in ({"suspend": True}, {"generators": scaling}, {"activeDeadlineSeconds": 1}):
        for numbers in (None, SUCCESS, FAILURE, page()):
            decision = reported(replace(edited(ended, **changes), numbers=numbers, pods=CRASHES))
            assert conditions(decision) == conditions(first)
            assert (decision.wanted.trainers, decision.wanted.generators) == (0, {"sim": 0})
            assert (decision.wanted.requested, decision.events, decision.delete_pods) == ({}, (), ())
            kept = {key: value for key, value in first.status.items() if key not in ("observedGeneration", "pools")}
            assert {key: decision.status.get(key) for key in kept} == kept


def test_an_end_whose_spec_is_no_longer_valid_stays() -> None:
    ended, first = lived({"numbers": SUCCESS}, start=running())
    decision = reported(replace(ended, job=None, invalid="x"))
    assert conditions(decision) == conditions(first)
    assert decision.wanted.generators == {"sim": 0}


def test_time_to_live_after_the_end() -> None:
    ended, first = lived({"numbers": SUCCESS}, start=edited(running(), ttlSecondsAfterFinished=100))
    assert (first.requeue_after_s, first.delete_job) == (100.0, False)
    decision = reported(ended)
    assert (decision.requeue_after_s, decision.delete_job) == (90.0, False)
    late = replace(ended, now=ended.now + timedelta(seconds=90))
    assert reported(late).delete_job
    metadata = {**late.raw["metadata"], "deletionTimestamp": "2026-01-01T13:00:00Z"}
    assert not reported(replace(late, raw={**late.raw, "metadata": metadata})).delete_job
    forever, _ = lived({"numbers": SUCCESS}, start=running())
    assert reported(replace(forever, now=NOW + timedelta(days=400))).delete_job is False


def test_a_job_that_is_being_deleted_wants_no_pods() -> None:
    look = running()
    metadata = {**look.raw["metadata"], "deletionTimestamp": "2026-01-01T13:00:00Z"}
    decision = reported(replace(look, raw={**look.raw, "metadata": metadata}))
    assert (decision.wanted.trainers, decision.wanted.generators, decision.wanted.requested) == (0, {"sim": 0}, {})
    assert conditions(decision)["Ready"] == ("False", "Deleting")
    assert (decision.status["step"], decision.events) == (3, ())


WORD = '{"step": 20, "result": {"status": "succeeded", "steps": 20}}'


@pytest.mark.parametrize(
    ("state", "is_heard"),
    [
        ({"code": 0, "message": WORD}, True),
        ({"last": 0, "message": WORD}, True),
        ({"last": 137, "message": WORD}, True),  # it idled after its word, and was killed: the life before is forgotten
        ({"last": 137, "message": "Traceback"}, False),
        ({"code": 0, "message": '{"step": 20}'}, False),
        ({"last": 0}, False),
    ],
    ids=str,
)
def test_the_last_word_is_heard_whichever_way_its_container_ended(state: dict[str, Any], *, is_heard: bool) -> None:
    pod = trainer(init=[container("scheduler", **state)])
    assert (last_word(pod) is not None) == is_heard
