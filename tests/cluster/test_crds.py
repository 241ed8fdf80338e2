"""Our CRDs at a real API server: accepted, of one verdict with `streamrl validate`, with rules for changes and `/scale`."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import job_files
from cluster.harness.api import GROUP
from cluster.harness.base import Cluster
from streamrl.changes import CHANGES
from streamrl.names import FIELD_MANAGER, REPLICAS_MANAGER
from streamrl.spec import parse_job
from streamrl_cli.yaml_document import read_documents

OTHER_VERDICT = {
    "bool-yes.yaml": "YAML 1.1, which kubectl and the API server read, has `yes` for true; we read 1.2",
    "octal.yaml": "the same with 0400, which is 256 there; we ask for 0o400, which is 256 everywhere",
    "empty.yaml": "no document, so no request; kubectl itself says that there are no objects",
}
"""Bad files that are not refused by the API server, and why that is by their nature."""
NOT_READ = "the API server cannot read it as an object, and says so without a field"
WHOLE_OBJECT = "it says it of the whole object, which has no name there"
FIRST_UNKNOWN = "unknown fields are told before, and instead of, what is wrong with others"
OTHER_WORDS = {
    "api-version.yaml": "the version is in the request's path: for this one there is no RLJob",
    "deep.yaml": NOT_READ,
    "list.yaml": NOT_READ,
    "tab-indent.yaml": NOT_READ,
    "text.yaml": NOT_READ,
    "pool-name-long-with-job.yaml": WHOLE_OBJECT,
    "pod-own-journal.yaml": WHOLE_OBJECT,
    "pod-own-secret.yaml": WHOLE_OBJECT,
    "name-number.yaml": "it says ObjectMeta.name",
    "tag.yaml": "it ignores the tag, reads a list and says so of spec.model; we give the line alone",
    "field-misspelt.yaml": FIRST_UNKNOWN,
    "section-misspelt.yaml": FIRST_UNKNOWN,
}
"""Bad files that it refuses without the name that we give, and why."""
BY_KUBECTL = {"two-jobs.yaml": "a merge key with an override: kubectl reads it, the API server's own reader does not"}
"""Good files that are asked through kubectl, which sends JSON."""
CRD_PATH = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
POOL_SPEC = {"jobName": "j", "poolName": "g", "scaling": "external", "maxReplicas": 8, "replicas": 2}
SPEC: dict[str, Any] = {
    "model": {"scratch": {}},
    "task": {
        "dataset": {"reasoningGym": {"name": "chain_sum", "parameters": {"min_terms": 2}}},
        "sampling": {"maxTokens": 64},
        "rewards": [{"name": "answer", "verifier": {}}],
    },
    "pipeline": {"batchGroups": 8, "steps": 10},
    "generators": [{"name": "a", "engine": {"hf": {}}}, {"name": "b", "engine": {"hf": {}}}],
}
ALLOWED_CHANGES: dict[str, dict[str, Any]] = {
    "suspend": {"suspend": True},
    "deadline": {"activeDeadlineSeconds": 60},
    "ttl": {"ttlSecondsAfterFinished": 60},
    "restarts": {"failurePolicy": {"maxRestarts": 9}},
    "rules": {"failurePolicy": {"rules": [{"name": "r", "action": "Restart"}]}},
    "replicas": {"generators": [{"scaling": {"static": {"replicas": 3}}}, {}]},
    "scaling": {"generators": [{"scaling": {"auto": {"maxReplicas": 3}}}, {"scaling": {"external": {}}}]},
    "generator-image": {"generators": [{}, {"pod": {"image": "example.com/generator:2"}}]},
    "default-written-out": {"seed": 0, "pipeline": SPEC["pipeline"] | {"mode": "StreamAsync"}},
}
SUSPENDED_CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "trainer-pod": ({"trainer": {"pod": {"image": "example.com/trainer:2"}}}, "trainer.pod"),
    "trainer-selector": ({"trainer": {"pod": {"nodeSelector": {"gpu": "h100"}}}}, "trainer.pod"),
    "trainer-cost": ({"trainer": {"costPerHour": "9"}}, "trainer.costPerHour"),
    "trainer-tokens": ({"trainer": {"microBatchTokens": 64}}, "trainer.microBatchTokens"),
    "trainer-checkpointing": ({"trainer": {"activationCheckpointing": True}}, "trainer.activationCheckpointing"),
    "gang": ({"gang": {}}, "gang"),
    "changed-data": ({"task": SPEC["task"] | {"allowChangedData": True}}, "task.allowChangedData"),
    "steps": ({"pipeline": SPEC["pipeline"] | {"steps": 11}}, "pipeline.steps"),
    "keep-last": ({"storage": {"checkpoints": {"keepLast": 9}}}, "storage.checkpoints.keepLast"),
    "engine": ({"generators": [{"engine": {"hf": {"slots": 3}}}, {}]}, "generators"),
    "cost": ({"generators": [{"costPerHour": "9"}, {}]}, "generators"),
    "pool-less": ({"generators": [{}]}, "generators"),
    "pool-more": ({"generators": [{}, {}, {"name": "c", "engine": {"hf": {}}}]}, "generators"),
    "pool-renamed": ({"generators": [{"name": "c"}, {}]}, "generators"),
}
"""Change -> the field that says when it may be made."""
REFUSED_CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "seed": ({"seed": 1}, "seed cannot be changed"),
    "model": ({"model": {"scratch": {"layers": 4}}}, "model cannot be changed"),
    "task": (
        {"task": SPEC["task"] | {"groupSize": 4}},
        "of task only task.allowChangedData can be changed; make a new job",
    ),
    "free-form": (
        {"task": SPEC["task"] | {"dataset": {"reasoningGym": {"name": "chain_sum", "parameters": {"min_terms": 3}}}}},
        "of task only",
    ),
    "algorithm": ({"algorithm": {"dapo": {}}}, "algorithm cannot be changed"),
    "pipeline": (
        {"pipeline": SPEC["pipeline"] | {"batchGroups": 9}},
        "of pipeline only pipeline.steps can be changed; make a new job",
    ),
    "staleness": ({"pipeline": SPEC["pipeline"] | {"maxStalenessSteps": 2}}, "of pipeline only"),
    "scheduling": ({"scheduling": {"leaseSeconds": 11}}, "scheduling cannot be changed"),
    "trainer": ({"trainer": {"learningRate": 0.5}}, "of trainer only trainer.pod, "),
    "lora": ({"trainer": {"lora": {}}}, "of trainer only"),
    "weights": ({"weights": {"http": {"timeoutSeconds": 1}}}, "weights cannot be changed"),
    "storage": ({"storage": {"journal": {"size": "2Gi"}}}, "of storage only storage.checkpoints.keepLast"),
    "claim": ({"storage": {"checkpoints": {"claimName": "other"}}}, "of storage only"),
    "tracing": ({"tracing": {"endpoint": "http://collector:4318/v1/traces"}}, "tracing cannot be changed"),
    "managed-by": ({"managedBy": "kueue.x-k8s.io/multikueue"}, "managedBy cannot be changed"),
}


def json_documents(text: str) -> Iterator[dict[str, Any]]:
    """JSON documents one after the other, as kubectl prints them."""
    while text := text.lstrip():
        document, end = json.JSONDecoder().raw_decode(text)
        yield document
        text = text[end:]


def by_name(path: Path) -> str:
    return path.name


def job(**spec: Any) -> dict[str, Any]:
    return {"apiVersion": "streamrl.io/v1alpha1", "kind": "RLJob", "metadata": {"name": "j"}, "spec": SPEC | spec}


def changed(change: dict[str, Any]) -> dict[str, Any]:
    """The job's spec after `change`; entries of `generators` go over those of the job, by position."""
    spec = copy.deepcopy(SPEC) | change
    if "generators" in change:
        old = [*SPEC["generators"], {}]
        spec["generators"] = [before | after for before, after in zip(old, change["generators"], strict=False)]
    return spec


@pytest.mark.parametrize("name", ["rljobs", "generatorpools"])
def test_the_api_server_takes_the_definition(control_plane: Cluster, name: str) -> None:
    body = control_plane.api.get(f"{CRD_PATH}/{name}.streamrl.io").expect()
    conditions = {one["type"]: one["status"] for one in body["status"]["conditions"]}
    assert conditions.items() >= {"Established": "True", "NamesAccepted": "True"}.items()
    assert "NonStructuralSchema" not in conditions


@pytest.mark.parametrize("path", job_files.GOOD, ids=by_name)
def test_good_files_are_taken_and_mean_the_same(control_plane: Cluster, path: Path) -> None:
    ours = [document.data for document in read_documents(path.read_text())]
    if path.name in BY_KUBECTL:
        answer = control_plane.kubectl("create", "--dry-run=server", "-o", "json", "-f", str(path)).stdout
        stored = list(json_documents(answer))
    else:
        stored = [job_files.ask(control_plane.api, "default", one).expect() for one in job_files.documents(path)]
    assert len(stored) == len(ours) > 0
    for theirs, document in zip(stored, ours, strict=True):
        plain = {"apiVersion": theirs["apiVersion"], "kind": theirs["kind"], "metadata": document["metadata"]}
        assert parse_job(plain | {"spec": theirs["spec"]}) == parse_job(document)


@pytest.mark.parametrize("path", job_files.BAD, ids=by_name)
def test_bad_files_get_the_verdict_of_validate(control_plane: Cluster, path: Path) -> None:
    bad = job_files.read_bad(path)
    answers = [job_files.ask(control_plane.api, "default", document) for document in job_files.documents(path)]
    refused = [answer for answer in answers if not answer.ok]
    taken = bad.local_only or path.name in OTHER_VERDICT
    assert bool(refused) == (not taken), [answer.message for answer in answers]
    if refused and path.name not in OTHER_WORDS:
        said = " ".join(answer.message for answer in refused)
        assert [field for field in bad.fields if field not in said] == [], said


def test_exceptions_are_files_of_the_corpus() -> None:
    assert {path.name for path in job_files.BAD} >= {*OTHER_VERDICT, *OTHER_WORDS}
    assert {path.name for path in job_files.GOOD} >= set(BY_KUBECTL)


@pytest.mark.parametrize("name", ALLOWED_CHANGES)
def test_what_may_change(control_plane: Cluster, namespace: str, name: str) -> None:
    path = f"{GROUP}/namespaces/{namespace}/rljobs"
    stored = control_plane.api.create(path, job()).expect()
    after = control_plane.api.replace(f"{path}/j", stored | {"spec": changed(ALLOWED_CHANGES[name])}).expect()
    grown = int(name != "default-written-out")
    assert after["metadata"]["generation"] == stored["metadata"]["generation"] + grown


@pytest.mark.parametrize("name", SUSPENDED_CHANGES)
def test_what_may_change_while_suspended(control_plane: Cluster, namespace: str, name: str) -> None:
    change, field = SUSPENDED_CHANGES[name]
    path = f"{GROUP}/namespaces/{namespace}/rljobs"
    stored = control_plane.api.create(path, job()).expect()
    answer = control_plane.api.replace(f"{path}/j", stored | {"spec": changed(change)})
    assert (answer.code, f"{field} can be changed only while the job is suspended" in answer.message) == (422, True)
    halted = control_plane.api.replace(f"{path}/j", stored | {"spec": changed(change) | {"suspend": True}}).expect()
    back = control_plane.api.replace(f"{path}/j", halted | {"spec": SPEC | {"suspend": False}}).expect()
    assert (halted["metadata"]["generation"], back["metadata"]["generation"]) == (2, 3)


def test_each_entry_of_the_table_is_tried() -> None:
    assert {path for path, when in CHANGES.items() if when == "WhileSuspended"} == {
        field for _, field in SUSPENDED_CHANGES.values()
    }


@pytest.mark.parametrize("suspend", [False, True])
@pytest.mark.parametrize("name", REFUSED_CHANGES)
def test_what_may_not_change(control_plane: Cluster, namespace: str, name: str, *, suspend: bool) -> None:
    change, message = REFUSED_CHANGES[name]
    path = f"{GROUP}/namespaces/{namespace}/rljobs"
    stored = control_plane.api.create(path, job(suspend=suspend)).expect()
    change = {**change, "suspend": suspend}
    answer = control_plane.api.replace(f"{path}/j", stored | {"spec": changed(change)})
    assert (answer.code, message in answer.message) == (422, True), answer.message
    assert control_plane.api.create(path, job(**changed(change)) | {"metadata": {"name": "other"}}).ok


def test_status_is_written_apart(control_plane: Cluster, namespace: str) -> None:
    path = f"{GROUP}/namespaces/{namespace}/rljobs"
    stored = control_plane.api.create(path, job() | {"status": {"step": 3}}).expect()
    assert stored.get("status", {}).get("step") is None
    after = control_plane.api.patch(f"{path}/j/status", {"status": {"step": 3}, "spec": {"suspend": True}}).expect()
    assert (after["status"]["step"], after["spec"]["suspend"], after["metadata"]["generation"]) == (3, False, 1)
    answer = control_plane.api.patch(f"{path}/j/status", {"status": {"step": -1}})
    assert (answer.code, "status.step" in answer.message) == (422, True)


def test_columns_show_the_state(control_plane: Cluster, namespace: str) -> None:
    path = f"{GROUP}/namespaces/{namespace}/rljobs"
    control_plane.api.create(path, job()).expect()
    ready = {
        "type": "Ready",
        "status": "True",
        "reason": "Training",
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    status = {"state": "Running", "step": 3, "reward": 0.5, "queue": 7, "conditions": [ready]}
    control_plane.api.patch(f"{path}/j/status", {"status": status}).expect()
    lines = control_plane.kubectl("get", "rlj", "-n", namespace).stdout.splitlines()
    assert lines[0].split() == ["NAME", "STATE", "STEP", "STEPS", "REWARD", "QUEUE", "READY", "REASON", "AGE"]
    assert lines[1].split()[:-1] == ["j", "Running", "3", "10", "0.5", "7", "True", "Training"]
    assert "What is trained" in control_plane.kubectl("explain", "rljob.spec").stdout


def test_a_pool_is_scaled(control_plane: Cluster, namespace: str) -> None:
    api, path = control_plane.api, f"{GROUP}/namespaces/{namespace}/generatorpools/j-g"
    apply_pool(control_plane, namespace, POOL_SPEC)
    status = {"replicas": 2, "selector": "streamrl.io/pool=g"}
    api.patch(f"{path}/status", {"status": status}).expect()
    scale = api.get(f"{path}/scale").expect()
    assert (scale["spec"]["replicas"], scale["status"]) == (2, status)
    control_plane.kubectl("scale", "generatorpool/j-g", "--replicas=5", "-n", namespace)
    assert api.get(path).expect()["spec"]["replicas"] == 5
    answer = api.patch(f"{path}/scale", {"spec": {"replicas": 1025}})
    assert (answer.code, "spec.replicas" in answer.message) == (422, True)


def test_a_pool_has_a_role_that_there_is(control_plane: Cluster, namespace: str) -> None:
    assert apply_pool(control_plane, namespace, POOL_SPEC)["role"] == "generator"
    lines = control_plane.kubectl("get", "rlgp", "-n", namespace).stdout.splitlines()
    assert lines[0].split() == ["NAME", "JOB", "ROLE", "SCALING", "ASKED", "DESIRED", "READY", "AGE"]
    assert lines[1].split()[:-1] == ["j-g", "j", "generator", "external", "2"]
    answer = control_plane.api.patch(
        f"{GROUP}/namespaces/{namespace}/generatorpools/j-g", {"spec": {"role": "environment"}}
    )
    assert (answer.code, "spec.role" in answer.message) == (422, True)


def test_replicas_keep_their_owner(control_plane: Cluster, namespace: str) -> None:
    """An apply of the rest leaves alone what another manager set; giving it up by omission resets it to the default."""
    rest = {name: value for name, value in POOL_SPEC.items() if name != "replicas"}
    apply_pool(control_plane, namespace, rest)
    apply_pool(control_plane, namespace, {**POOL_SPEC, "replicas": 4}, manager=REPLICAS_MANAGER)
    assert apply_pool(control_plane, namespace, rest | {"maxReplicas": 9})["replicas"] == 4
    control_plane.kubectl("scale", "generatorpool/j-g", "--replicas=6", "-n", namespace)
    assert apply_pool(control_plane, namespace, rest)["replicas"] == 6


def apply_pool(
    cluster: Cluster, namespace: str, spec: dict[str, Any], *, manager: str = FIELD_MANAGER
) -> dict[str, Any]:
    """Server-side apply of the pool `j-g`; its spec afterwards."""
    body = {
        "apiVersion": "streamrl.io/v1alpha1",
        "kind": "GeneratorPool",
        "metadata": {"name": "j-g", "namespace": namespace},
        "spec": spec,
    }
    path = f"{GROUP}/namespaces/{namespace}/generatorpools/j-g"
    stored = cluster.api.patch(path, body, kind="apply", fieldManager=manager, force="true").expect()
    after: dict[str, Any] = stored["spec"]
    return after
