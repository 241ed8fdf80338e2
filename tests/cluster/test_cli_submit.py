"""`streamrl submit` at a real API server: what it makes, what it refuses, and what it leaves as it is."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.command_fixtures import REWARDS, Cli, context, stored
from cluster.harness.api import GROUP
from cluster.harness.base import Cluster
from streamrl.spec import parse_job
from streamrl_cli.cluster import reader
from support.command import streamrl
from support.planned import find, planned


def test_submit_makes_the_code_and_the_job(cli: Cli, control_plane: Cluster, namespace: str, job_file: Path) -> None:
    outcome = cli("submit", str(job_file))
    assert (outcome.code, outcome.err) == (0, [])
    assert outcome.out == [
        "configmap/sum-code: rewards.py, words.py, questions.jsonl (1 KiB)",
        f"rljob/sum created in namespace {namespace} of context {context(control_plane)}",
        f"look: streamrl status sum -n {namespace}",
    ]
    job = stored(control_plane, namespace, "rljobs/sum")
    assert job["spec"]["task"]["code"] == {"configMapName": "sum-code"}
    assert job["spec"]["task"]["dataset"]["jsonl"]["path"] == "questions.jsonl"
    code = stored(control_plane, namespace, "configmaps/sum-code")
    assert code["data"]["rewards.py"] == REWARDS
    assert [owner["uid"] for owner in code["metadata"]["ownerReferences"]] == [job["metadata"]["uid"]]


def test_submit_again_changes_nothing_but_what_was_edited(
    cli: Cli, control_plane: Cluster, namespace: str, job_file: Path
) -> None:
    assert cli("submit", str(job_file)).code == 0
    first = stored(control_plane, namespace, "rljobs/sum")
    assert " unchanged " in cli("submit", str(job_file)).out[1]
    assert stored(control_plane, namespace, "rljobs/sum")["metadata"]["generation"] == 1
    assert " changed " in cli("submit", str(job_file), "--set", "spec.activeDeadlineSeconds=60").out[1]
    after = stored(control_plane, namespace, "rljobs/sum")
    assert (after["spec"]["activeDeadlineSeconds"], after["metadata"]["uid"]) == (60, first["metadata"]["uid"])


def test_what_the_api_server_refuses_is_a_line_with_its_field(cli: Cli, job_file: Path) -> None:
    assert cli("submit", str(job_file)).code == 0
    outcome = cli("submit", str(job_file), "--set", "spec.seed=2")
    assert (outcome.code, outcome.out) == (2, [])
    assert len(outcome.err) == 1
    assert "seed cannot be changed; make a new job" in outcome.err[0]


def test_code_stays_what_the_job_began_with(cli: Cli, control_plane: Cluster, namespace: str, job_file: Path) -> None:
    def code() -> Any:
        return stored(control_plane, namespace, "configmaps/sum-code")["data"]

    assert cli("submit", str(job_file)).code == 0
    (job_file.parent / "rewards.py").write_text(REWARDS + "# changed\n")
    refused_job = cli("submit", str(job_file), "--set", "spec.seed=2")
    assert (refused_job.code, code()["rewards.py"]) == (2, REWARDS)
    refused_code = cli("submit", str(job_file))
    assert (refused_code.code, refused_code.out, code()["rewards.py"]) == (2, [], REWARDS)
    assert refused_code.err == [
        "configmap/sum-code: rewards.py cannot be changed: pods that start again would go on with other code than the job began with; "
        "make a new job, or change it all the same with --force"
    ]
    assert cli("submit", str(job_file), "--force").code == 0
    assert code()["rewards.py"] == REWARDS + "# changed\n"


def test_a_mistake_in_the_file_reaches_no_cluster(
    cli: Cli, control_plane: Cluster, namespace: str, job_file: Path
) -> None:
    outcome = cli("submit", str(job_file), "--set", "spec.pipeline.steps=0", "--set", "spec.seed=-1")
    assert (outcome.code, outcome.out, len(outcome.err)) == (2, [], 2)
    assert cli("status").out == [f"no jobs in namespace {namespace} of context {context(control_plane)}"]


def test_of_several_jobs_all_are_taken_or_none(
    cli: Cli, control_plane: Cluster, namespace: str, job_file: Path
) -> None:
    assert cli("submit", str(job_file)).code == 0
    other = job_file.read_text().replace("name: sum}", "name: other}")
    job_file.write_text(f"{other}\n---\n{job_file.read_text()}".replace("seed: 1", "seed: 2"))
    outcome = cli("submit", str(job_file))
    assert (outcome.code, outcome.out) == (2, [])
    assert "seed cannot be changed" in outcome.err[0]
    assert not control_plane.api.get(f"{GROUP}/namespaces/{namespace}/rljobs/other").ok


def config_map(name: str, **data: str) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data})


def test_config_maps_of_the_file_come_before_its_jobs(
    cli: Cli, control_plane: Cluster, namespace: str, job_file: Path
) -> None:
    job = job_file.read_text()
    job_file.write_text(f"{config_map('settings', A='1')}\n---\n{job}")
    outcome = cli("submit", str(job_file))
    assert (outcome.code, outcome.err) == (0, [])
    assert outcome.out[0] == f"configmap/settings of {job_file}"
    assert stored(control_plane, namespace, "configmaps/settings")["data"] == {"A": "1"}
    seed = job.replace("seed: 1", "seed: 2")
    for maps in (
        config_map("settings", A="2"),
        '{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}, "dat": {}}',
    ):
        job_file.write_text(f"{maps}\n---\n{seed if 'settings' in maps else job}")
        refused = cli("submit", str(job_file))
        assert (refused.code, refused.out, len(refused.err)) == (2, [], 1)
    assert stored(control_plane, namespace, "configmaps/settings")["data"] == {"A": "1"}


def test_code_of_the_file_stays_what_the_job_began_with(
    cli: Cli, control_plane: Cluster, namespace: str, job_file: Path
) -> None:
    job, own = job_file.read_text(), ("--set", "spec.task.code.configMapName=own")
    for number, code in (("1", 0), ("1", 0), ("2", 2)):
        job_file.write_text(f"{config_map('own', **{'rewards.py': f'A = {number}'})}\n---\n{job}")
        outcome = cli("submit", str(job_file), *own)
        assert outcome.code == code, outcome
    assert "configmap/own: rewards.py cannot be changed" in outcome.err[0]
    assert stored(control_plane, namespace, "configmaps/own")["data"] == {"rewards.py": "A = 1"}


def test_other_kinds_are_for_kubectl(cli: Cli, job_file: Path) -> None:
    secret = '{"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "token"}}'
    job_file.write_text(f"{secret}\n---\n{job_file.read_text()}")
    outcome = cli("submit", str(job_file))
    kubectl = "give it to kubectl apply, in a file of its own"
    assert outcome.err == [f"{job_file}:1: kind: must be RLJob or ConfigMap, got 'Secret'; {kubectl}"]


def test_samples_after_the_end_are_asked_in_a_pod_that_the_api_server_takes(
    cli: Cli, control_plane: Cluster, namespace: str, job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a node it stays pending, and goes with the command."""
    assert cli("submit", str(job_file)).code == 0
    found = stored(control_plane, namespace, "rljobs/sum")
    job = {"apiVersion": found["apiVersion"], "kind": found["kind"], "metadata": {"name": "sum"}, "spec": found["spec"]}
    time = "2026-01-01T12:00:00Z"
    ended = {"type": "Succeeded", "status": "True", "reason": "Completed", "message": "", "lastTransitionTime": time}
    path = f"{GROUP}/namespaces/{namespace}/rljobs/sum/status"
    control_plane.api.patch(path, {"status": {"conditions": [ended]}}).expect()
    trainer = find(planned(parse_job(job)), "StatefulSet", "sum-trainer")
    trainer["metadata"] |= {"namespace": namespace, "ownerReferences": []}
    trainer["spec"]["replicas"] = 0
    control_plane.api.create(f"/apis/apps/v1/namespaces/{namespace}/statefulsets", trainer).expect()
    account = {"metadata": {"name": "sum-pods"}}
    control_plane.api.create(f"/api/v1/namespaces/{namespace}/serviceaccounts", account).expect()
    monkeypatch.setattr(reader, "START_S", 0.0)
    outcome = cli("samples", "sum")
    assert (outcome.code, len(outcome.err)) == (2, 1)
    assert "does not start to read the job's volume" in outcome.err[0]
    assert control_plane.api.get(f"/api/v1/namespaces/{namespace}/pods").expect()["items"] == []


def test_a_name_is_drawn_for_generate_name(cli: Cli, control_plane: Cluster, namespace: str, job_file: Path) -> None:
    job_file.write_text(job_file.read_text().replace("{name: sum}", "{generateName: sum-}"))
    assert [cli("submit", str(job_file)).code for _ in range(2)] == [0, 0]
    found = control_plane.api.get(f"{GROUP}/namespaces/{namespace}/rljobs").expect()["items"]
    made = [each["metadata"]["name"] for each in found]
    assert len(set(made)) == 2
    assert all(name.startswith("sum-") and len(name) == len("sum-") + 5 for name in made)


def test_a_dry_run_leaves_nothing(cli: Cli, control_plane: Cluster, namespace: str, job_file: Path) -> None:
    outcome = cli("submit", str(job_file), "--dry-run")
    assert outcome.code == 0
    assert outcome.out[-1].endswith(" (dry run: nothing was done)")
    assert not control_plane.api.get(f"/api/v1/namespaces/{namespace}/configmaps/sum-code").ok
    assert not control_plane.api.get(f"{GROUP}/namespaces/{namespace}/rljobs/sum").ok


def test_what_somebody_else_set_is_taken_only_by_force(
    cli: Cli, patch: Callable[..., dict[str, Any]], job_file: Path
) -> None:
    setting = ("--set", "spec.suspend=false")
    assert cli("submit", str(job_file), *setting).code == 0
    patch(manager="kueue", spec={"suspend": True})
    outcome = cli("submit", str(job_file), *setting)
    assert outcome.code == 2
    assert outcome.err == [
        "spec.suspend: was set by kueue since; write that value into the file, or take the file's with --force"
    ]
    assert cli("submit", str(job_file), *setting, "--force").code == 0
    assert cli("submit", str(job_file), *setting).code == 0


def test_a_config_map_that_is_not_there_is_told(cli: Cli, job_file: Path) -> None:
    outcome = cli("submit", str(job_file), "--set", "spec.task.code={configMapName: mine}")
    assert outcome.code == 0
    assert outcome.err[0].startswith("configmap/mine is not there yet, and the job's pods wait for it; kubectl create")


def test_another_namespace_in_the_file_is_refused(cli: Cli, job_file: Path) -> None:
    outcome = cli("submit", str(job_file), "--set", "metadata.namespace=other")
    assert outcome.code == 2
    assert outcome.err[0].startswith("metadata.namespace: must be that of --namespace")


def test_a_namespace_that_is_not_there(
    control_plane: Cluster, capsys: pytest.CaptureFixture[str], job_file: Path
) -> None:
    outcome = streamrl(capsys, "submit", str(job_file), "--kubeconfig", str(control_plane.kubeconfig), "-n", "absent")
    assert outcome.err == ["namespace absent: does not exist; make it: kubectl create namespace absent"]
