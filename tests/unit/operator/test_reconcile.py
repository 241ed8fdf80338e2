"""Looks at one job of which something is refused: what is held up, what goes on, and what is said."""

from collections import Counter
from collections.abc import AsyncIterator
from datetime import datetime
from typing import cast

import pytest

from streamrl import names
from streamrl_operator import reconcile
from streamrl_operator.kube.answers import KubeError, RequestRefusedError
from streamrl_operator.kube.kinds import (
    CLAIM,
    CONFIG_MAP,
    GENERATOR_POOL,
    JOB_DEFAULTS,
    NETWORK_POLICY,
    POD,
    QUOTA,
    STATEFUL_SET,
)
from streamrl_operator.observe import DEFAULTS_KEPT_S
from streamrl_operator.planning.conditions import Aspect
from streamrl_operator.reconcile import ReconcileResult
from support.api_server import Doc
from support.metric_pages import series
from support.observed_jobs import JOB, NOW, SETTINGS, container, job_document, page, pod, trainer
from support.reconciled_jobs import LAB, LIVES, World, world_of

BAD = {"resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}}
WHY = "requests: must be less than or equal to cpu limit"
SUCCESS = page(result={"status": "succeeded", "steps": 20, "final_reward": 0.9})
REPLACE = {"name": "r", "onExitCodes": [139], "action": "ReplacePodAndIgnoreMaxRestarts"}
RUNNING = {"trainer": 1, "one": 2, "two": 1, "three": 1}
BEGUN = dict.fromkeys(RUNNING, 0) | {"trainer": 1}
"""The generators wait for the trainer."""


def refuse_bad_pods(world: World) -> None:
    """Refuse as an API server does where requests are above limits."""
    world.server.refuse = lambda _, path, body: (422, WHY) if _has_bad_pods(path, body) else None


def _has_bad_pods(path: str, body: Doc) -> bool:
    template = (body.get("spec") or {}).get("template")
    return path.startswith(STATEFUL_SET.path(LAB)) and template is not None and _main(template) == BAD["resources"]


def _main(template: Doc) -> object:
    return template["spec"]["containers"][0]["resources"]


@pytest.fixture
async def world() -> AsyncIterator[World]:
    document = job_document()
    engine = document["spec"]["generators"][0]["engine"]
    scalings = {"one": {"static": {"replicas": 2}}, "two": {"external": {}}, "three": {"static": {"replicas": 1}}}
    document["spec"]["generators"] = [
        {"name": name, "engine": engine, "scaling": scaling} for name, scaling in scalings.items()
    ]
    async with world_of() as made:
        made.put(document)
        yield made


@pytest.fixture
async def running(world: World) -> World:
    """Brought about, with its pods."""
    await world.look()
    await world.trainer_is_ready()
    await world.pods_are(
        *(pod(f"{JOB}-{name}-0", containers=[container("generator")]) for name in ("one", "two", "three"))
    )
    world.server.page = page()
    assert not (await world.look(2)).refused
    assert (world.sizes(), world.condition("Ready")) == (RUNNING, ("True", "Running"))
    return world


@pytest.fixture
async def refused(running: World) -> World:
    """Its first pool's pods were edited, and the API server will not have them."""
    refuse_bad_pods(running)
    running.edit(pool="one", fields={"pod": BAD})
    await running.look(2)
    return running


async def rests(world: World) -> None:
    """Nothing but what is refused is tried again."""
    await world.look(2)
    done = len(world.server.writes)
    await world.look(2)
    assert [line for line in world.server.writes[done:] if not line.endswith((" 422", " 403"))] == []


async def test_what_is_known_of_a_job_is_on_the_operators_page(running: World) -> None:
    page = running.reconciler.metrics.page()
    labels = {"namespace": LAB, "rljob": JOB}
    assert series(page, "streamrl_job_condition", type="Ready", **labels) == 1
    assert series(page, "streamrl_pool_desired_replicas", pool="one", **labels) == 2
    for role, life_s in {"ca": LIVES.ca_s, "scheduler": LIVES.leaf_s, "trainer": LIVES.leaf_s}.items():
        ends = series(page, "streamrl_job_certificate_expiry_timestamp_seconds", role=role, **labels)
        assert 0 < ends - NOW.timestamp() - life_s < 3600, role


async def test_a_running_job_goes_on_beside_a_pool_that_is_refused(refused: World) -> None:
    assert refused.condition("Ready") == ("False", "Refused")
    assert WHY in refused.ready_message()
    assert refused.warnings() == ["Refused"]
    await rests(refused)
    refused.server.page = page(step=9)
    refused.edit(pool="three", fields={"scaling": {"static": {"replicas": 4}}})
    await refused.scale("two", 3)
    reconciled = await refused.look()
    assert (reconciled.refused, reconciled.again_s) == ("Refused", SETTINGS.resync_s)
    assert refused.sizes() == RUNNING | {"two": 3, "three": 4}
    assert (refused.status["step"], refused.condition("Ready")) == (9, ("False", "Refused"))
    refused.edit(pool="one", fields={"pod": {}})
    assert not (await refused.look()).refused
    assert refused.condition("Ready") == ("True", "Running")


async def test_a_refused_pool_gets_fewer_pods_and_no_more(refused: World) -> None:
    for asked, got in ((5, 2), (1, 1), (3, 1)):
        refused.edit(pool="one", fields={"scaling": {"static": {"replicas": asked}}})
        await refused.look(2)
        assert refused.sizes()["one"] == got
    refused.edit(pool="one", fields={"pod": {}})
    await refused.look()
    assert refused.sizes()["one"] == 3


async def test_the_end_of_a_job_with_a_refused_pool_is_final_and_leaves_no_pods(refused: World) -> None:
    refused.server.page = SUCCESS
    for _ in range(3):
        reconciled = await refused.look()
        assert refused.condition("Succeeded") == ("True", "Completed")
        assert refused.condition("Ready") == ("True", "Completed")
        assert set(refused.sizes().values()) == {0}
    assert reconciled == ReconcileResult()  # nothing more is tried
    await rests(refused)


async def test_what_refuses_all_but_the_status_does_not_undo_the_end(running: World) -> None:
    running.server.refuse = lambda _, path, __: (403, "no") if "/statefulsets/" in path else None
    running.server.page = SUCCESS
    reconciled = await running.look(2)
    assert (reconciled.refused, reconciled.again_s) == ("Refused", SETTINGS.resync_s)
    assert running.condition("Succeeded") == ("True", "Completed")
    assert running.sizes() == RUNNING
    running.server.refuse = lambda *_: None
    await running.look()
    assert set(running.sizes().values()) == {0}


@pytest.mark.parametrize("has_ended", [False, True], ids=["running", "ended"])
async def test_a_deletion_waits_for_the_jobs_own_pods_and_says_so(running: World, *, has_ended: bool) -> None:
    if has_ended:
        running.server.page = SUCCESS
        await running.look(2)
    own = {each["metadata"]["name"] for each in running.server.under(POD.path(LAB))}
    others = {"somebodys-0", f"{JOB}-trainer-debug"}
    await running.pods_are(*(pod(name) for name in others))
    running.put({**running.job, "metadata": {**running.job["metadata"], "deletionTimestamp": "2026-01-01T13:00:00Z"}})
    await running.look()
    listed = ", ".join(f"Pod {name}" for name in sorted(own)[:3])
    assert running.ready_message() == f"the job is being deleted; it waits until these are gone: {listed} and 1 more"
    assert running.condition("Succeeded")[0] == str(has_ended)
    for each in running.server.under(POD.path(LAB)):
        if each["metadata"]["name"] in own:
            await running.cluster.delete(each)
    await running.look()
    assert running.job["metadata"]["finalizers"] == []
    assert {each["metadata"]["name"] for each in running.server.under(POD.path(LAB))} == others


async def test_an_enlarged_claim_holds_nothing_up(running: World) -> None:
    """Somebody has enlarged it, and something else of it is to be put right: an API server refuses a smaller size."""
    claim = running.server.objects[CLAIM.path(LAB, names.journal_claim(JOB))]
    large = {"resources": {"requests": {"storage": "20Ti"}}}
    labels = {**claim["metadata"]["labels"], names.LABEL_JOB_UID: "other"}
    await running.cluster.merge(claim, {"spec": large, "metadata": {"labels": labels}})
    running.server.refuse = lambda _, path, body: (
        (422, "can not be less than previous value")
        if "/persistentvolumeclaims/" in path and body["spec"]["resources"] != large["resources"]
        else None
    )
    assert not (await running.look()).refused
    found = running.server.objects[CLAIM.path(LAB, names.journal_claim(JOB))]
    assert (found["metadata"]["labels"], found["spec"]["resources"]) == (
        claim["metadata"]["labels"],
        large["resources"],
    )
    await rests(running)


async def test_a_job_with_a_refused_pool_can_be_suspended(refused: World) -> None:
    refused.edit(suspend=True)
    await refused.look()
    assert set(refused.sizes().values()) == {0}
    for each in refused.server.under(POD.path(LAB)):
        await refused.cluster.delete(each)
    await refused.look()
    assert refused.condition("Suspended") == ("True", "Suspended")
    await rests(refused)
    refused.edit(suspend=False)
    await refused.look()
    assert (refused.condition("Ready"), set(refused.sizes().values())) == (("False", "Refused"), {0})
    refused.edit(pool="one", fields={"pod": {}})
    await refused.look()
    assert refused.sizes() == BEGUN
    await refused.trainer_is_ready()
    await refused.look()
    assert refused.sizes() == RUNNING


async def test_failures_beside_a_refused_pool_count_towards_the_end(refused: World) -> None:
    for life in range(1, 5):
        await refused.pods_are(pod(f"{JOB}-two-0", containers=[container("generator", restarts=life, last=1)]))
        await refused.look()
        assert refused.status["restarts"] == life
    assert refused.condition("Failed") == ("True", "TooManyRestarts")
    assert set(refused.sizes().values()) == {0}


async def test_a_failure_is_not_counted_before_its_pod_could_be_deleted(refused: World) -> None:
    refused.edit(failurePolicy={"rules": [REPLACE]})
    await refused.pods_are(pod(f"{JOB}-two-0", containers=[container("generator", restarts=1, last=139)]))
    refused.refuse(f"{JOB}-two-0")
    with pytest.raises(RequestRefusedError):
        await refused.look()
    assert (refused.condition("Ready"), refused.status["ignoredRestarts"]) == (("False", "Refused"), 0)
    refuse_bad_pods(refused)
    await refused.look()
    assert refused.status["ignoredRestarts"] == 1
    assert POD.path(LAB, f"{JOB}-two-0") not in refused.server.objects


GUARDS = [NETWORK_POLICY.path(LAB, f"{JOB}-one"), GENERATOR_POOL.path(LAB, f"{JOB}-one")]


@pytest.mark.parametrize("guard", GUARDS, ids=["policy", "pool"])
async def test_no_pod_at_all_without_what_a_pool_needs(world: World, guard: str) -> None:
    world.refuse(guard)
    await world.look(2)
    assert world.sizes() == {}
    assert (world.condition("Ready"), "startTime" in world.status) == (("False", "Refused"), False)
    world.server.refuse = lambda *_: None
    await world.look()
    assert world.sizes() == BEGUN


WHOLE = [
    CONFIG_MAP.path(LAB, names.resolved(JOB)),
    STATEFUL_SET.path(LAB, names.trainer(JOB)),
    f"/secrets/{JOB}-tls-trainer",
    f"/networkpolicies/{JOB}-trainer",
]


@pytest.mark.parametrize("needed", WHOLE)
async def test_no_pod_at_all_without_what_the_job_needs(world: World, needed: str) -> None:
    world.refuse(needed)
    for _ in range(2):
        assert await world.look() == ReconcileResult(again_s=SETTINGS.resync_s, refused="Refused")
    assert world.sizes() == {}
    found = [each["type"] for each in world.status["conditions"]]
    assert found == ["Ready", "Suspended", "Succeeded", "Failed", "Reconciling", "Stalled"]
    assert (world.condition("Ready"), "startTime" in world.status) == (("False", "Refused"), False)  # no clock runs yet
    assert world.warnings() == ["Refused"]
    world.server.refuse = lambda *_: None
    await world.look()
    assert world.sizes() == BEGUN


async def test_what_the_whole_job_needs_holds_up_growth_and_nothing_else(running: World) -> None:
    path = CONFIG_MAP.path(LAB, names.resolved(JOB))
    await running.cluster.merge(running.server.objects[path], {"data": {"job.json": "somebody's"}})
    running.edit(pool="one", fields={"scaling": {"static": {"replicas": 4}}})
    await running.scale("two", 0)
    running.server.page = page(step=9)
    running.refuse(path)
    await running.look()
    assert running.sizes() == RUNNING | {"two": 0}
    assert (running.status["step"], running.condition("Ready")) == (9, ("False", "Refused"))


async def test_a_name_that_is_taken_is_clean_alone(world: World) -> None:
    path = CONFIG_MAP.path(LAB, names.resolved(JOB))
    theirs = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": names.resolved(JOB), "namespace": LAB}}
    before = world.server.put(path, theirs)
    await world.look()
    assert world.condition("Ready") == ("False", "NameTaken")
    assert (world.sizes(), world.server.objects[path]) == ({}, before)


async def test_what_is_told_of_a_server_that_fails_goes_with_the_next_look(running: World) -> None:
    reported = Aspect(type="Ready", holds=False, reason="ServerError", message="m")
    await running.reconciler.say((LAB, JOB), reported)
    assert (running.condition("Ready"), running.condition("Failed")) == (
        ("False", "ServerError"),
        ("False", "InProgress"),
    )
    assert running.status["step"] == 3
    await running.look()
    assert running.condition("Ready") == ("True", "Running")


async def test_nothing_is_told_over_an_end(running: World) -> None:
    running.server.page = SUCCESS
    await running.look()
    ended = running.status
    await running.reconciler.say((LAB, JOB), Aspect(type="Ready", holds=False, reason="ServerError", message="m"))
    assert running.status == ended


async def test_a_job_that_another_brings_about_is_clean_alone(world: World) -> None:
    world.edit(managedBy="kueue.x-k8s.io/multikueue")
    assert await world.look() == ReconcileResult()
    assert world.server.writes == []


async def test_a_job_begins_without_a_read_of_what_it_makes(world: World) -> None:
    await world.look()
    assert world.sizes() == BEGUN
    assert world.server.reads == [JOB_DEFAULTS.path(LAB, "default"), QUOTA.path(LAB)]
    written = Counter(line.split()[1] for line in world.server.writes)
    pools = {GENERATOR_POOL.path(LAB, names.pool(JOB, name)) for name in ("one", "two", "three")}
    assert {path for path, times in written.items() if times > 1} == pools, "their replicas have a manager of their own"


async def test_the_defaults_that_a_job_waits_with_are_read_seldom(world: World) -> None:
    world.ticks.each_s = DEFAULTS_KEPT_S / 1000
    world.edit(suspend=True)
    await world.look(9)
    assert world.server.reads == [JOB_DEFAULTS.path(LAB, "default")]
    world.edit(failurePolicy={"maxRestarts": 7})
    await world.look(9)
    assert len(world.server.reads) == 2, "somebody may have changed both"
    world.ticks.seconds += DEFAULTS_KEPT_S
    await world.look(9)
    assert len(world.server.reads) == 3


async def test_where_many_jobs_run_each_is_refreshed_less_often(
    running: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconcile, "REFRESHES_PER_S", 0.01)
    running.ticks.each_s = 1.0
    for after_s, step in ((200.0, 4), (60.0, 4), (60.0, 5)):
        running.server.page = page(step=running.status["step"] + 1)
        running.ticks.seconds += after_s
        assert (await running.look()).again_s == 100.0
        assert running.status["step"] == step


@pytest.fixture
async def resting(running: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """Among many jobs: its numbers are read every 100 s, and progress is written with each fourth reading. It has just been."""
    monkeypatch.setattr(reconcile, "REFRESHES_PER_S", 0.01)
    monkeypatch.setattr(reconcile, "PROGRESS_WRITES_PER_S", 0.003)
    await running.pods_are(pod(f"{JOB}-one-1", containers=[container("generator")]))
    running.ticks.each_s = 0.0
    running.ticks.seconds += 1000.0
    running.server.page = page(step=10)
    assert (await running.look(2)).again_s == 100.0
    assert running.status["step"] == 10
    return running


@pytest.mark.parametrize("has_changed", [True, False])
async def test_where_many_jobs_run_numbers_are_read_more_often_than_progress_is_written(
    resting: World, has_changed: bool
) -> None:
    read, written = len(resting.server.pages), len(resting.server.writes)
    for step in (11, 12, 13):
        resting.server.page = page(step=step)
        resting.ticks.seconds += 100.0
        await resting.look(has_changed=has_changed)
    assert (len(resting.server.pages), len(resting.server.writes)) == (read + 3, written)
    resting.ticks.seconds += 100.0
    await resting.look(has_changed=has_changed)
    assert (len(resting.server.writes), resting.status["step"]) == (written + 1, 13)


@pytest.mark.parametrize(
    ("numbers", "condition"),
    [
        ({"warnings": [{"type": "ProcessFrozen", "message": "m"}]}, ("ProcessFrozen", "NoSignOfLife")),
        ({"cost": 5.0}, ("CostAboveMax", "AboveMaxCost")),
        ({"result": SUCCESS["result"]}, ("Succeeded", "Completed")),
    ],
    ids=["a warning", "maxCost", "an end"],
)
async def test_what_the_numbers_call_for_waits_for_no_write_of_progress(
    resting: World, numbers: Doc, condition: tuple[str, str]
) -> None:
    resting.edit(maxCost={"amount": "5", "action": "Warn"})
    await resting.look(2)
    resting.server.page = page(step=11, cost=4.9)
    resting.ticks.seconds += 100.0
    await resting.look(has_changed=False)
    resting.server.page = page(step=12, **numbers)
    resting.ticks.seconds += 100.0
    await resting.look(has_changed=False)
    kind, reason = condition
    assert resting.condition(kind) == ("True", reason)


async def test_a_resting_job_whose_numbers_cannot_be_read_says_so_and_rests_again_after(resting: World) -> None:
    scheduler = container("scheduler") | {"ready": True}
    await resting.pods_are(trainer(init=[scheduler], containers=[container("trainer")]))
    await resting.look()
    read, resting.server.page = resting.server.page, cast("Doc", ["no page"])
    for _ in range(6):
        resting.ticks.seconds += 100.0
        await resting.look(has_changed=False)
    assert resting.condition("Ready") == ("False", "NumbersUnreachable")
    resting.server.page = read
    resting.ticks.seconds += 100.0
    await resting.look(has_changed=False)
    assert resting.condition("Ready") == ("True", "Running")


async def test_a_resting_job_is_looked_at_when_something_changes_or_its_deadline_comes(resting: World) -> None:
    ran = resting.ticks.now() - datetime.fromisoformat(resting.status["startTime"])
    resting.edit(activeDeadlineSeconds=int(ran.total_seconds()) + 150)
    assert (await resting.look(2)).again_s == 100.0
    await resting.pods_are(pod(f"{JOB}-two-0", containers=[container("generator")], ready=False))
    await resting.look(has_changed=False)
    assert "4 of 4 generators" in resting.ready_message(), "nothing is computed"
    await resting.look()
    assert "3 of 4 generators" in resting.ready_message()
    await resting.pods_are(pod(f"{JOB}-two-0", containers=[container("generator")]))
    await resting.look()
    resting.ticks.seconds += 100.0
    assert (await resting.look(has_changed=False)).again_s == 50.0
    resting.ticks.seconds += 50.0
    await resting.look(has_changed=False)
    assert resting.condition("Failed") == ("True", "DeadlineExceeded")


# ---- a spec that is changed


async def test_of_a_changed_job_nothing_is_touched_while_its_pods_go(world: World) -> None:
    await world.look(2)
    before = world.server.objects[CONFIG_MAP.path(LAB, names.resolved(JOB))]["data"]
    await world.pods_are(trainer(), pod(f"{JOB}-three-0"))
    pools = [each for each in world.job["spec"]["generators"] if each["name"] != "three"]
    four = {**pools[0], "name": "four"}
    world.edit(suspend=True, generators=[*pools, four], pipeline={**world.job["spec"]["pipeline"], "steps": 77})
    await world.look(2)
    assert world.sizes() == dict.fromkeys(RUNNING, 0)
    assert world.server.objects[CONFIG_MAP.path(LAB, names.resolved(JOB))]["data"] == before
    assert NETWORK_POLICY.path(LAB, names.pool(JOB, "three")) in world.server.objects, "it guards a pod that ends"
    assert world.condition("Suspended") == ("False", "Suspending")
    for each in world.server.under(POD.path(LAB)):
        await world.cluster.delete(each)
    await world.look(2)
    assert world.sizes() == {"trainer": 0, "one": 0, "two": 0, "four": 0}
    assert '"steps":77' in world.server.objects[CONFIG_MAP.path(LAB, names.resolved(JOB))]["data"]["job.json"]
    assert not [path for path in world.server.objects if path.endswith(f"{JOB}-three")]
    assert world.condition("Suspended") == ("True", "Suspended")
    world.edit(suspend=False)
    await world.trainer_is_ready()
    await world.look(2)
    assert world.sizes() == {"trainer": 1, "one": 2, "two": 1, "four": 2}


async def test_an_operator_that_ends_amid_a_change_is_followed_by_one_that_goes_on(world: World) -> None:
    await world.look(2)
    pools = world.job["spec"]["generators"]
    world.edit(suspend=True, generators=[*pools, {**pools[0], "name": "four"}])
    await world.look()
    world.server.refuse = lambda _, path, __: None if "/configmaps/" in path else (500, "gone")
    with pytest.raises(KubeError):
        await world.look()
    assert '"four"' in world.server.objects[CONFIG_MAP.path(LAB, names.resolved(JOB))]["data"]["job.json"]
    world.server.refuse = lambda *_: None
    world.edit(suspend=False)
    await world.trainer_is_ready()
    await world.look(2)
    assert world.sizes() == RUNNING | {"four": 2}
