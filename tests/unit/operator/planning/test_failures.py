"""What counts as a failure, by which rule, and that each counts once."""

import json
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.spec.training import FailurePolicy
from streamrl.status import RLJobStatus
from streamrl_operator.planning import failures
from streamrl_operator.planning.failures import FAIL, LONGEST_LIFE_S, REPLACE, RESTART, RestartAccounting
from streamrl_operator.planning.values import stamp
from support.observed_jobs import (
    JOB,
    NOW,
    agents,
    container,
    generator,
    generator_whose,
    trainer,
    trainer_whose,
    trainer_worker,
)

DESIRED = {f"{JOB}-trainer": 1, f"{JOB}-trainer-workers": 2, f"{JOB}-sim": 2, f"{JOB}-agents": 1}


def policy(*rules: dict[str, Any], most: int = 5) -> FailurePolicy:
    named = [{"name": f"r{number}", **rule} for number, rule in enumerate(rules)]
    return FailurePolicy.model_validate_json(json.dumps({"maxRestarts": most, "rules": named}))


def count(
    *pods: dict,
    before: RLJobStatus = RLJobStatus(),  # noqa: B008 - frozen
    rules: FailurePolicy | None = None,
    **given: Any,
) -> RestartAccounting:
    whole = {"sets": {}, "desired": DESIRED, "now": NOW, **given}
    return failures.count_restarts(before, policy=rules or policy(), all_pods=pods, **whole)


def after(before: RLJobStatus, reported: RestartAccounting) -> RLJobStatus:
    return before.model_copy(
        update={"restarts": reported.restarts, "ignored_restarts": reported.ignored, "seen_failures": reported.seen}
    )


CRASH = {"restarts": 1, "last": 1}


@pytest.mark.parametrize(
    ("pod", "reason", "role", "action"),
    [
        (generator_whose(**CRASH), "Error", "Generator", RESTART),
        (generator_whose(code=137, reason="OOMKilled"), "OOMKilled", "Generator", RESTART),
        (generator_whose(code=2, message="bad"), "Error", "Generator", FAIL),
        (generator_whose(code=255, reason="Unknown"), "NodeLost", "Generator", REPLACE),
        (trainer_whose(waiting="CrashLoopBackOff", last=75), "Error", "Trainer", RESTART),
        (trainer(init=[container("scheduler", **CRASH)]), "Error", "Scheduler", RESTART),
        (trainer(init=[container("prepare", code=2)]), "Error", "Trainer", FAIL),
        (trainer(init=[container("prepare", code=1)]), "Error", "Trainer", RESTART),
        (trainer(disruption="PreemptionByScheduler"), "Preempted", "Trainer", REPLACE),
        (generator(disruption="DeletionByTaintManager", leaving=True), "NodeLost", "Generator", REPLACE),
        (generator(disruption="EvictionByEvictionAPI", leaving=True), "Deleted", "Generator", REPLACE),
        (generator(disruption="TerminationByKubelet", phase="Failed"), "Evicted", "Generator", REPLACE),
        (generator(phase="Failed", reason="Evicted"), "Evicted", "Generator", REPLACE),
        *(
            (generator(phase="Failed", reason=reason), "Rejected", "Generator", REPLACE)
            for reason in (
                "UnexpectedAdmissionError",
                "OutOfcpu",
                "OutOfnvidia.com/gpu",
                "NodeAffinity",
                "TopologyAffinityError",
                "SysctlForbidden",
            )
        ),
        (generator(phase="Failed", reason="Shutdown"), "Evicted", "Generator", REPLACE),
        (trainer(phase="Failed", reason="NodeAffinity", leaving=True), "Rejected", "Trainer", REPLACE),
        (
            generator(phase="Failed", reason="OutOfpods", containers=[container("generator", code=137)]),
            "Rejected",
            "Generator",
            REPLACE,
        ),
        (
            generator(phase="Failed", reason="Odd", containers=[container("generator", code=1)]),
            "Error",
            "Generator",
            RESTART,
        ),
        (generator(phase="Failed"), "Error", "Generator", RESTART),
        (generator(leaving=True), "Deleted", "Generator", REPLACE),
        (agents(containers=[container("agent-link", **CRASH)]), "Error", "Agents", RESTART),
        (agents(containers=[container("agent-link", code=2)]), "Error", "Agents", FAIL),
        (agents(leaving=True), "Deleted", "Agents", REPLACE),
        (trainer_worker(containers=[container("trainer", **CRASH)]), "Error", "Trainer", RESTART),
        (trainer_worker(init=[container("prepare", code=2)]), "Error", "Trainer", FAIL),
        (trainer_worker(disruption="EvictionByEvictionAPI", leaving=True), "Deleted", "Trainer", REPLACE),
    ],
)
def test_reason_role_and_default_action(pod: dict, reason: str, role: str, action: str) -> None:
    (judged,) = count(pod).new
    assert (judged.failure.reason, judged.failure.role, judged.action, judged.rule) == (reason, role, action, "default")


@pytest.mark.parametrize(
    "pod",
    [
        trainer(),
        trainer(init=[container("prepare", code=0, reason="Completed")]),
        trainer(init=[container("scheduler", restarts=1, last=0, reason="Completed")]),
        generator_whose(code=0, reason="Completed"),
        agents(init=[container("agents", restarts=3, last=137, reason="OOMKilled")]),
        generator_whose(waiting="ContainerCreating"),
        trainer_whose(restarts=1, last=76),
        trainer_worker(containers=[container("trainer", restarts=1, last=76)]),
    ],
)
def test_what_is_no_failure(pod: dict) -> None:
    reported = count(pod)
    assert (reported.new, reported.seen, reported.restarts, reported.ignored) == ((), (), 0, 0)


OOM_OF_GENERATORS = {"role": "Generator", "onReasons": ["OOMKilled"], "action": FAIL}


@pytest.mark.parametrize(
    ("rules", "pod", "rule", "action"),
    [
        ([OOM_OF_GENERATORS], generator_whose(code=137, reason="OOMKilled"), "r0", FAIL),
        ([OOM_OF_GENERATORS], trainer_whose(code=137, reason="OOMKilled"), "default", RESTART),
        ([{"onExitCodes": [2], "action": RESTART}], trainer_whose(code=2), "r0", RESTART),
        ([{"onExitCodes": [3, 4], "action": FAIL}], trainer_whose(code=4), "r0", FAIL),
        ([{"onExitCodes": [3], "action": FAIL}], trainer(leaving=True), "default", REPLACE),
        ([{"onReasons": ["Deleted"], "action": RESTART}], trainer(leaving=True), "r0", RESTART),
        ([{"onReasons": ["Rejected"], "action": FAIL}], trainer(phase="Failed", reason="OutOfmemory"), "r0", FAIL),
        ([{"action": REPLACE}, {"action": FAIL}], trainer_whose(code=9), "r0", REPLACE),
        (
            [{"role": "Scheduler", "action": FAIL}, {"action": REPLACE}],
            trainer(init=[container("scheduler", code=9)]),
            "r0",
            FAIL,
        ),
        ([{"role": "Scheduler", "action": FAIL}, {"action": REPLACE}], trainer_whose(code=9), "r1", REPLACE),
    ],
)
def test_the_first_rule_that_matches_decides(rules: list[dict], pod: dict, rule: str, action: str) -> None:
    (judged,) = count(pod, rules=policy(*rules)).new
    assert (judged.rule, judged.action) == (rule, action)


def rejected(ordinal: int = 0, *, time: int = 0) -> dict[str, Any]:
    """A generator's pod that a kubelet has refused to start; `time`: how many were before it."""
    return generator(ordinal, phase="Failed", reason="UnexpectedAdmissionError", uid=f"u-{ordinal}-{time}")


def test_pods_that_kubelets_reject_again_and_again_are_not_counted_and_come_slowly() -> None:
    """Each time a new pod is made as soon as it may be, and is rejected."""
    before, at_s, waits = RLJobStatus(), 0.0, []
    for time in range(9):
        now = NOW + timedelta(seconds=at_s)
        reported = count(rejected(time=time), before=before, now=now)
        holds = failures.hold_sets(before, new=reported.new, all_pods=[rejected(time=time)], desired=DESIRED, now=now)
        before = after(before, reported).model_copy(update={"holds": holds})
        waits.append(failures.held_sets(before, now=now).get(f"{JOB}-sim", 0.0))
        at_s += waits[-1] + 1
    assert (before.restarts, before.ignored_restarts) == (0, 9)
    assert waits == [0, 10, 20, 40, 80, 160, 300, 300, 300]
    ready = [generator(0, containers=[container("generator")]), generator(1, containers=[container("generator")])]
    now = NOW + timedelta(seconds=at_s)
    assert failures.hold_sets(before, new=(), all_pods=ready[:1], desired=DESIRED, now=now) == before.holds
    assert failures.hold_sets(before, new=(), all_pods=ready, desired=DESIRED, now=now) == ()


def test_pods_that_are_rejected_together_are_one_time() -> None:
    both = [rejected(0), rejected(1)]
    first = count(*both)
    holds = failures.hold_sets(RLJobStatus(), new=first.new, all_pods=both, desired=DESIRED, now=NOW)
    assert [(hold.name, hold.rejections) for hold in holds] == [(f"{JOB}-sim", 1)]
    before = RLJobStatus(holds=(holds[0].model_copy(update={"until": stamp(NOW + timedelta(seconds=9))}),))
    assert failures.hold_sets(before, new=first.new, all_pods=both, desired=DESIRED, now=NOW) == before.holds


def test_an_event_says_that_a_kubelet_rejected_a_pod() -> None:
    reported = count(rejected() | {"status": rejected()["status"] | {"message": "Pod was rejected: no devices"}})
    (event,) = failures.failure_events(reported, most_restarts=5)
    assert (event.kind, event.reason) == ("Normal", "PodRejected")
    assert event.message == (
        f"pod {JOB}-sim-0 is lost (Rejected): UnexpectedAdmissionError: Pod was rejected: no devices; "
        "rule default: ReplacePodAndIgnoreMaxRestarts; restarts that count: 0 of 5"
    )


def test_a_container_is_counted_once_through_its_end_its_back_off_and_its_next_life() -> None:
    before, restarts = RLJobStatus(), []
    for state in (
        container("trainer", code=1),
        container("trainer", waiting="CrashLoopBackOff", last=1),
        container("trainer", restarts=1, last=1),
        container("trainer", restarts=1, code=1) | {"lastState": {"terminated": {"exitCode": 1}}},
        container("trainer", restarts=2, last=1),
    ):
        reported = count(trainer(containers=[state]), before=before)
        before = after(before, reported)
        restarts.append(reported.restarts)
    assert restarts == [1, 1, 1, 2, 2]


def test_a_runtimes_id_names_a_life_whatever_the_count_says() -> None:
    first = count(trainer_whose(code=1, runtime_id="a" * 64))
    assert first.seen == (f"u-{JOB}-trainer-0/trainer/{'a' * 12}",)
    again = trainer_whose(restarts=5, last=1, runtime_id="a" * 64)
    assert count(again, before=after(RLJobStatus(), first)).restarts == 1


def test_the_containers_of_a_lost_pod_are_no_news() -> None:
    reported = count(generator(leaving=True, containers=[container("generator", code=137)]))
    assert [(judged.failure.container, judged.action) for judged in reported.new] == [("", REPLACE)]


@pytest.mark.parametrize(
    ("pod", "given"),
    [
        (generator(2, leaving=True), {}),
        (generator(0, leaving=True), {"desired": {}}),
        (generator(0, leaving=True, revision="r1"), {"sets": {f"{JOB}-sim": {"status": {"updateRevision": "r2"}}}}),
        (  # the controller deletes pods first and tells of the new template after (found by the spec campaign)
            generator(0, leaving=True, revision="r1"),
            {
                "sets": {
                    f"{JOB}-sim": {
                        "metadata": {"generation": 2},
                        "status": {"updateRevision": "r1", "observedGeneration": 1},
                    }
                }
            },
        ),
    ],
)
def test_a_pod_that_goes_because_we_want_it_is_no_failure(pod: dict, given: dict) -> None:
    reported = count(pod, **given)
    assert (reported.new, reported.ignored) == ((), 0)
    later = count(pod, before=after(RLJobStatus(), reported), desired={f"{JOB}-sim": 9})  # and not when we want it back
    assert (later.new, later.ignored) == ((), 0)


def test_a_rule_that_replaces_the_pod_deletes_it_and_does_not_count_its_loss() -> None:
    rules = policy({"onExitCodes": [139], "action": REPLACE})
    reported = count(generator_whose(code=139), rules=rules)
    assert (reported.delete_pods, reported.ignored) == ((f"{JOB}-sim-0",), 1)
    later = count(generator(leaving=True), rules=rules, before=after(RLJobStatus(), reported))
    assert (later.delete_pods, later.ignored, later.new) == ((), 1, ())


def aged(pod: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The pod, made so long ago."""
    return pod | {"metadata": pod["metadata"] | {"creationTimestamp": stamp(NOW - timedelta(seconds=seconds))}}


@pytest.mark.parametrize(
    ("ignored", "age_s", "replaced"),
    [
        (0, 0, True),
        (1, 9, False),
        (1, 10, True),
        (2, 19, False),
        (3, 40, True),
        (5, 159, False),
        (6, 300, True),
        (6, 299, False),
        (10_000, 299, False),
        (10_000, 300, True),
    ],
)
def test_a_rule_replaces_a_pod_that_has_lived_and_leaves_a_new_one_to_the_kubelet(
    ignored: int, age_s: float, replaced: bool
) -> None:
    rules = policy({"onExitCodes": [139], "action": REPLACE})
    before = RLJobStatus(ignored_restarts=ignored)
    reported = count(aged(generator_whose(code=139), age_s), rules=rules, before=before)
    assert reported.delete_pods == ((f"{JOB}-sim-0",) if replaced else ())
    assert (reported.ignored, reported.restarts) == (ignored + 1, 0)
    (event,) = failures.failure_events(reported, most_restarts=5)
    assert event.message.endswith("started again in place") is not replaced
    again = aged(generator_whose(restarts=1, last=139), age_s + 400)
    later = count(again, rules=rules, before=after(before, reported))
    assert (later.new, later.delete_pods) == ((), ())  # one life, one decision


def test_a_pod_that_always_fails_is_replaced_ever_more_slowly() -> None:
    """A container that fails 3 s after its pod is made, and as often as a kubelet starts it again, for an hour."""
    rules = policy({"action": REPLACE})
    before, replaced, made_s, life, lives, now_s = RLJobStatus(), [], 0.0, 0, 0, 3.0
    while now_s < 3600.0:
        state = container("generator", restarts=life, code=139, runtime_id=f"{lives:064d}")
        reported = count(
            aged(generator(uid=f"u-{made_s}", containers=[state]), now_s - made_s), rules=rules, before=before
        )
        before, lives = after(before, reported), lives + 1
        if reported.delete_pods:
            replaced.append(now_s)
            made_s, life, now_s = now_s, 0, now_s + 3.0
        else:
            life, now_s = life + 1, now_s + min(10.0 * 2.0**life, 300.0)
    gaps = [later - earlier for earlier, later in pairwise(replaced)]
    assert len(replaced) <= 15
    assert all(gap >= LONGEST_LIFE_S for gap in gaps[3:])


def test_pods_that_are_gone_are_forgotten_late_and_never_counted_again() -> None:
    crashed = generator_whose(**CRASH)
    first = count(crashed)
    before = after(RLJobStatus(), count(before=after(RLJobStatus(), first)))  # a look that sees no pod
    assert count(crashed, before=before).restarts == 1


def test_more_failures_than_can_be_remembered_are_counted_late_rather_than_twice() -> None:
    desired = {**DESIRED, f"{JOB}-sim": 400}
    crashed = [generator_whose(number, **CRASH) for number in range(400)]
    crashed.append(trainer_whose(**CRASH))
    reported = count(*crashed, desired=desired)
    assert reported.restarts == failures.MOST_SEEN
    assert any("trainer" in one for one in reported.seen)
    again = count(*crashed, before=after(RLJobStatus(), reported), desired=desired)
    assert again.restarts == reported.restarts
    assert len(failures.failure_events(reported, most_restarts=5)) == failures.MOST_EVENTS + 1


def test_an_event_tells_of_the_rule_and_the_count() -> None:
    reported = count(generator_whose(code=9, message="line one\nline two\n"))
    (event,) = failures.failure_events(reported, most_restarts=5)
    assert (event.kind, event.reason) == ("Warning", "PodFailed")
    assert event.message == (
        f"container generator of pod {JOB}-sim-0 ended with exit code 9 (Error): line one\nline two; "
        "rule default: Restart; restarts that count: 1 of 5"
    )


LIVES = st.builds(
    container,
    st.just("generator"),
    restarts=st.integers(0, 4),
    code=st.sampled_from([None, 0, 1, 75, 137]),
    last=st.sampled_from([None, 0, 1, 137]),
)
PODS = st.lists(
    st.builds(
        generator,
        st.integers(0, 3),
        containers=st.lists(LIVES, max_size=1),
        leaving=st.booleans(),
        uid=st.sampled_from("abc"),
    ),
    max_size=5,
    unique_by=lambda pod: pod["metadata"]["uid"],
)


@given(st.lists(PODS, max_size=6))
def test_counters_never_fall_and_a_second_look_counts_nothing(looks: list[list[dict]]) -> None:
    before = RLJobStatus()
    for pods in looks:
        reported = count(*pods, before=before)
        assert reported.restarts >= (before.restarts or 0)
        assert reported.ignored >= (before.ignored_restarts or 0)
        assert len(reported.new) == reported.restarts + reported.ignored - (before.restarts or 0) - (
            before.ignored_restarts or 0
        )
        before = after(before, reported)
        again = count(*pods, before=before)
        assert (again.new, again.seen, again.restarts) == ((), reported.seen, reported.restarts)
        assert failures.mark_as_seen(before, all_pods=pods) == failures.mark_as_seen(
            after(before, reported).model_copy(update={"seen_failures": failures.mark_as_seen(before, all_pods=pods)}),
            all_pods=pods,
        )
    assert RLJobStatus.model_validate_json(before.model_dump_json(by_alias=True)) == before
