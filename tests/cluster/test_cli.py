"""The commands over clusters, at a real API server: what they do, and what they print."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from cluster.command_fixtures import Cli, context, stored
from cluster.harness import kubeconfigs
from cluster.harness.api import GROUP
from cluster.harness.base import Cluster
from cluster.harness.control_plane import ControlPlane
from cluster.harness.processes import wait_until
from streamrl import names
from streamrl_cli.cluster import api
from streamrl_cli.cluster.jobs import follow
from support.chart import CHART, runner
from support.command import streamrl
from support.ports import free_port

SOON_S, COLLECTED_S = 60.0, 180.0
"""For the API server; for the garbage collector, which looks for new kinds each half a minute."""
STATUS = {
    "step": 42,
    "reward": 0.875,
    "queue": 7,
    "tokensPerSecond": 1234.5,
    "bubbles": {"pipelinePercent": 12.4, "skewPercent": 3.1},
    "attempt": 1,
    "restarts": 2,
    "checkpointPath": "/var/lib/streamrl/store/sum/checkpoints/step-00000040",
    "pools": [{"name": "fixed", "desired": 2, "ready": 1}, {"name": "outside", "desired": 1, "ready": 1}],
}


def condition(kind: str, *, holds: bool, reason: str, message: str = "") -> dict[str, Any]:
    return {
        "type": kind,
        "status": "True" if holds else "False",
        "reason": reason,
        "message": message,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }


def test_status_shows_the_table_and_the_detail(
    cli: Cli, control_plane: Cluster, namespace: str, patch: Callable[..., dict[str, Any]], job_file: Path
) -> None:
    cli("submit", str(job_file))
    assert cli("status").out[1].split()[:3] == ["sum", "NotSeen", "-/100"]
    ready = condition("Ready", holds=True, reason="Running", message="3 of 3")
    patch("/status", status=STATUS | {"conditions": [ready]})
    head, line = cli("status").out
    assert head.split() == ["NAME", "STATE", "STEP", "REWARD", "QUEUE", "BUBBLES", "GENERATORS", "AGE"]
    assert line.split()[:-1] == [
        "sum",
        "Running",
        "42/100",
        "0.875",
        "7",
        "12",
        "%",
        "pipeline,",
        "3",
        "%",
        "skew",
        "2/3",
    ]
    make_pool(control_plane, namespace, history=True)
    make_event(control_plane, namespace, stored(control_plane, namespace, "rljobs/sum"))
    detail = "\n".join(cli("status", "sum").out)
    for text in (
        f"{namespace}/sum: Running - 3 of 3",
        "attempt 1, restarts 2 of 5, not counted 0",
        "checkpoint /var/lib/streamrl/store/sum/checkpoints/step-00000040",
        "outside  external  1      1        1",
        "1 -> 3  queue of 90 samples",
        "Warning  PodLost  generator sum-fixed-1 was evicted",
    ):
        assert text in detail


def test_the_role_edit_is_enough(
    control_plane: Cluster, namespace: str, job_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    helm = runner(tmp_path / "helm", control_plane.kubeconfig)
    values = f"crds.install=false,images.registry=r.example.com,watchNamespaces={{{namespace}}}"
    helm("install", "rl", str(CHART), "--namespace", namespace, "--set", values)
    control_plane.kubectl("create", "serviceaccount", "ann", "-n", namespace)
    ann = f"--serviceaccount={namespace}:ann"
    control_plane.kubectl("create", "rolebinding", "ann", "--clusterrole=edit", ann, "-n", namespace)
    can = ("auth", "can-i", "create", "rljobs", f"--as=system:serviceaccount:{namespace}:ann", "-n", namespace)
    wait_until(
        lambda: control_plane.kubectl(*can, check=False).returncode == 0,
        what="the role edit to have the rules of the chart",
        deadline_s=SOON_S,
    )
    own = ("--kubeconfig", str(control_plane.kubeconfig_of_account(namespace, "ann")), "-n", namespace)
    assert streamrl(capsys, "submit", str(job_file), *own).code == 0
    make_event(control_plane, namespace, stored(control_plane, namespace, "rljobs/sum"))
    for command in (("status",), ("status", "sum"), ("top", "sum", "--once"), ("logs", "sum"), ("suspend", "sum")):
        assert not [line for line in streamrl(capsys, *command, *own).err if "may not" in line], command
    assert "generator sum-fixed-1 was evicted" in "\n".join(streamrl(capsys, "status", "sum", *own).out)
    helm("uninstall", "rl", "--namespace", namespace, "--no-hooks")


def make_pool(cluster: Cluster, namespace: str, *, history: bool = False) -> None:
    """As the operator makes it."""
    path = f"{GROUP}/namespaces/{namespace}/generatorpools"
    metadata = {"name": names.pool("sum", "outside"), "labels": {names.LABEL_JOB: "sum"}}
    spec = {"jobName": "sum", "poolName": "outside", "scaling": "external", "maxReplicas": 8, "replicas": 1}
    kind = {"apiVersion": "streamrl.io/v1alpha1", "kind": "GeneratorPool"}
    cluster.api.create(path, kind | {"metadata": metadata, "spec": spec}, fieldManager=names.REPLICAS_MANAGER).expect()
    change = {"time": "2026-01-01T00:00:00Z", "fromReplicas": 1, "toReplicas": 3, "reason": "queue of 90 samples"}
    status = {"replicas": 1, "readyReplicas": 1, "desiredReplicas": 1, "reason": "asked for"}
    if history:
        status["scalingHistory"] = [change]
    cluster.api.patch(f"{path}/{metadata['name']}/status", {"status": status}).expect()


def make_event(cluster: Cluster, namespace: str, job: dict[str, Any]) -> None:
    regarding = {"apiVersion": job["apiVersion"], "kind": "RLJob", "name": "sum", "namespace": namespace}
    event = {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": "sum.1"},
        "regarding": regarding | {"uid": job["metadata"]["uid"]},
        "type": "Warning",
        "reason": "PodLost",
        "action": "Restart",
        "note": "generator sum-fixed-1 was evicted",
        "eventTime": "2026-01-01T00:00:00.000000Z",
        "reportingController": "streamrl-operator",
        "reportingInstance": "test",
    }
    cluster.api.create(f"/apis/events.k8s.io/v1/namespaces/{namespace}/events", event).expect()


@pytest.mark.parametrize(("form", "read"), [("json", json.loads), ("yaml", YAML(typ="safe", pure=True).load)])
def test_status_gives_the_object(cli: Cli, job_file: Path, form: str, read: Callable[[str], Any]) -> None:
    cli("submit", str(job_file))
    one = read("\n".join(cli("status", "sum", "-o", form).out))
    assert (one["kind"], one["spec"]["pipeline"]["steps"]) == ("RLJob", 100)


async def test_follow_ends_with_the_job(
    control_plane: Cluster,
    namespace: str,
    patch: Callable[..., dict[str, Any]],
    job_file: Path,
    cli_follow: "Following",
) -> None:
    del control_plane, namespace, job_file
    end = condition("Succeeded", holds=True, reason="Done", message="all steps are done")
    steps: list[dict[str, Any]] = [STATUS, STATUS | {"step": 43}, STATUS | {"step": 100, "conditions": [end]}]
    code, said = await cli_follow(lambda: patch("/status", status=steps.pop(0)) if steps else None)
    assert code == 0
    assert [line.split(",")[0] for line in said] == [
        "NotSeen: step -/100",
        "NotSeen: step 42/100",
        "NotSeen: step 43/100",
        "Succeeded: step 100/100",
    ]


async def test_follow_of_a_job_that_fails_is_1_and_says_why(
    patch: Callable[..., dict[str, Any]], cli_follow: "Following"
) -> None:
    end = condition("Failed", holds=True, reason="Deadline", message="longer than 60 s")
    code, said = await cli_follow(lambda: patch("/status", status={"conditions": [end]}))
    assert code == 1
    assert said[-1].startswith("Failed: ")
    assert said[-1].endswith("; longer than 60 s")


Following = Callable[[Callable[[], object]], Any]


@pytest.fixture
def cli_follow(control_plane: Cluster, namespace: str, job_file: Path) -> Following:
    """Follow the job; after each line that is said something happens to it."""
    path = f"{GROUP}/namespaces/{namespace}/rljobs"
    document = YAML(typ="safe", pure=True).load(job_file.read_text())
    control_plane.api.create(path, document).expect()
    args = argparse.Namespace(kubeconfig=control_plane.kubeconfig, context=None, namespace=namespace)

    async def run(then: Callable[[], object]) -> tuple[int, list[str]]:
        said: list[str] = []

        def say(line: str) -> None:
            said.append(line)
            then()

        async with api.connect(args) as cluster:
            return await follow("sum", cluster=cluster, interval_s=0.01, say=say), said

    return run


def test_suspend_and_resume(cli: Cli, control_plane: Cluster, namespace: str, job_file: Path) -> None:
    cli("submit", str(job_file))
    assert cli("suspend", "sum").out == ["rljob/sum suspended: its pods go, its volumes stay"]
    assert stored(control_plane, namespace, "rljobs/sum")["spec"]["suspend"] is True
    assert cli("status").out[1].split()[1] == "Suspended"
    assert cli("suspend", "sum").out == ["rljob/sum is suspended already"]
    assert cli("submit", str(job_file)).code == 0  # says nothing of suspend, so it stays
    assert stored(control_plane, namespace, "rljobs/sum")["spec"]["suspend"] is True
    assert cli("resume", "sum").out == ["rljob/sum resumed: its pods are made again"]
    assert stored(control_plane, namespace, "rljobs/sum")["spec"]["suspend"] is False


@pytest.mark.parametrize("command", [("suspend", "sum"), ("resume", "sum"), ("scale", "sum", "fixed", "3")])
def test_a_job_that_has_ended_is_left_alone(
    cli: Cli, patch: Callable[..., dict[str, Any]], job_file: Path, command: tuple[str, ...]
) -> None:
    cli("submit", str(job_file))
    patch("/status", status={"conditions": [condition("Succeeded", holds=True, reason="Done")]})
    outcome = cli(*command)
    assert outcome.code == 2
    assert "it is Succeeded" in outcome.err[0]


def test_scale_a_static_pool(cli: Cli, control_plane: Cluster, namespace: str, job_file: Path) -> None:
    cli("submit", str(job_file))
    assert cli("scale", "sum", "fixed", "5").out == ["pool fixed of rljob/sum: 2 -> 5 replicas"]
    pools = stored(control_plane, namespace, "rljobs/sum")["spec"]["generators"]
    assert [pool["scaling"] for pool in pools][:2] == [
        {"static": {"replicas": 5}},
        {"external": {"initialReplicas": 1}},
    ]
    again = cli("submit", str(job_file))
    assert again.code == 2
    assert "replicas: was set by streamrl-cli since" in again.err[0]


def test_scale_an_external_pool(cli: Cli, control_plane: Cluster, namespace: str, job_file: Path) -> None:
    cli("submit", str(job_file))
    early = cli("scale", "sum", "outside", "4")
    assert early.err == ["generatorpool/sum-outside: was not made by the operator yet; see `streamrl status sum`"]
    make_pool(control_plane, namespace)
    assert cli("scale", "sum", "outside", "4").out == ["pool outside of rljob/sum: 1 -> 4 replicas"]
    assert stored(control_plane, namespace, "generatorpools/sum-outside/scale")["spec"]["replicas"] == 4


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ("own", "3"),
            "spec.generators[2].scaling.auto: sets the size by queue and pace; by hand it would not last; change "
            "minReplicas or maxReplicas of the job, or give the pool {external: {initialReplicas: 3}}",
        ),
        (("fixd", "3"), "POOL: is not a pool of the job, got 'fixd'; did you mean fixed?"),
        (("fixed", "0"), "N: must be 1 to 1024, got 0; `streamrl suspend` takes all pods away"),
    ],
)
def test_what_cannot_be_scaled_says_the_remedy(cli: Cli, job_file: Path, arguments: tuple[str, ...], line: str) -> None:
    cli("submit", str(job_file))
    outcome = cli("scale", "sum", *arguments)
    assert (outcome.code, outcome.err) == (2, [line])


@pytest.mark.parametrize(
    ("flags", "spec", "stays"),
    [
        ((), "Retain", True),
        ((), "Delete", False),
        (("--keep-checkpoints",), "Delete", True),
        (("--no-keep-checkpoints",), "Retain", False),
    ],
)
def test_cancel_deletes_the_job_and_settles_its_checkpoints(
    cli: Cli, control_plane: Cluster, namespace: str, job_file: Path, flags: tuple[str, ...], spec: str, *, stays: bool
) -> None:
    cli("submit", str(job_file), "--set", f"spec.storage.checkpoints.whenDeleted={spec}")
    make_claim(control_plane, stored(control_plane, namespace, "rljobs/sum"), owned=spec == "Delete")
    outcome = cli("cancel", "sum", "--yes", *flags)
    fate = "stay" if stays else "are deleted too"
    assert outcome.out == [f"rljob/sum is being deleted; the checkpoints (claim sum-checkpoints) {fate}"]
    path = f"/api/v1/namespaces/{namespace}"
    jobs = f"{GROUP}/namespaces/{namespace}/rljobs/sum"
    wait_until(lambda: not control_plane.api.get(jobs).ok, what="the job to be gone", deadline_s=SOON_S)
    code = f"{path}/configmaps/sum-code"
    wait_until(lambda: not control_plane.api.get(code).ok, what="the job's code to be gone", deadline_s=COLLECTED_S)
    claim = control_plane.api.get(f"{path}/persistentvolumeclaims/sum-checkpoints")
    if stays:
        assert not claim.expect()["metadata"].get("ownerReferences")
    else:
        gone = f"{path}/persistentvolumeclaims/sum-checkpoints"
        wait_until(lambda: not control_plane.api.get(gone).ok, what="the claim to be gone", deadline_s=COLLECTED_S)


def make_claim(cluster: Cluster, job: dict[str, Any], *, owned: bool) -> None:
    """As the operator makes it."""
    meta = job["metadata"]
    owner = {"apiVersion": job["apiVersion"], "kind": "RLJob", "name": meta["name"], "uid": meta["uid"]}
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "sum-checkpoints", "ownerReferences": [owner] if owned else []},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    cluster.api.create(f"/api/v1/namespaces/{meta['namespace']}/persistentvolumeclaims", claim).expect()


def test_cancel_asks_first(cli: Cli, control_plane: Cluster, namespace: str, job_file: Path) -> None:
    cli("submit", str(job_file))
    assert cli("cancel", "sum").err == ["--yes: is required where nobody can be asked; add --yes to delete the job"]
    assert stored(control_plane, namespace, "rljobs/sum")["metadata"].get("deletionTimestamp") is None


def test_logs_of_a_job_without_pods(cli: Cli, job_file: Path) -> None:
    cli("submit", str(job_file))
    assert cli("logs", "sum").err == ["sum: has no pods with such logs now; see `streamrl status sum`"]


@pytest.mark.parametrize(
    "command", [("status", "sum"), ("logs", "sum"), ("suspend", "sum"), ("cancel", "sum", "--yes")]
)
def test_a_job_that_is_not_there(cli: Cli, namespace: str, command: tuple[str, ...]) -> None:
    outcome = cli(*command)
    line = f"rljobs.streamrl.io/sum: is not in namespace {namespace}; `streamrl status` lists the jobs"
    assert (outcome.code, outcome.err) == (2, [line])


def test_a_user_without_the_right(
    own_control_plane: ControlPlane, namespace: str, capsys: pytest.CaptureFixture[str], job_file: Path
) -> None:
    where = ("--kubeconfig", str(own_control_plane.kubeconfig_for("eve")), "-n", namespace)
    outcome = streamrl(capsys, "submit", str(job_file), *where)
    line = (
        f"context test: user eve may not get rljobs.streamrl.io in namespace {namespace}; ask for a role with this verb"
    )
    assert (outcome.code, outcome.err) == (2, [line])
    assert "user eve may not list rljobs.streamrl.io" in streamrl(capsys, "status", *where).err[0]


def test_a_user_nobody_knows(control_plane: Cluster, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = YAML(typ="safe", pure=True).load(control_plane.kubeconfig.read_text())
    path = kubeconfigs.derive(tmp_path / "config", config, kubeconfigs.by_token("nobodys"))
    outcome = streamrl(capsys, "status", "--kubeconfig", str(path))
    assert outcome.code == 2
    assert outcome.err[0].startswith("context test: the API server does not know this user; log in again")


def test_an_api_server_that_is_away(control_plane: Cluster, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = YAML(typ="safe", pure=True).load(control_plane.kubeconfig.read_text())
    server = f"https://127.0.0.1:{free_port()}"
    config["clusters"][0]["cluster"]["server"] = server
    path = tmp_path / "config"
    path.write_text(json.dumps(config))
    outcome = streamrl(capsys, "status", "--kubeconfig", str(path))
    assert outcome.code == 2
    assert outcome.err[0].startswith(f"context {context(control_plane)}: its API server {server} cannot be reached (")
    assert "refused" in outcome.err[0].lower()


def test_a_cluster_without_the_operator(
    own_control_plane: ControlPlane, namespace: str, capsys: pytest.CaptureFixture[str], job_file: Path
) -> None:
    plane, where = own_control_plane, ("--kubeconfig", str(own_control_plane.kubeconfig), "-n", namespace)
    definition = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/rljobs.streamrl.io"
    for left in plane.api.get(f"{GROUP}/rljobs").expect()[
        "items"
    ]:  # by other tests, with nobody to clear their finalizers
        path = f"{GROUP}/namespaces/{left['metadata']['namespace']}/rljobs/{left['metadata']['name']}"
        plane.api.patch(path, {"metadata": {"finalizers": None}})
    plane.api.delete(definition).expect()
    try:
        wait_until(lambda: not plane.api.get(f"{GROUP}/rljobs").ok, what="rljobs to be unknown", deadline_s=SOON_S)
        outcome = streamrl(capsys, "submit", str(job_file), *where)
        assert outcome.code == 2
        assert outcome.err[0].startswith(
            "rljobs.streamrl.io: is not known to the cluster of context test; install the operator"
        )
    finally:
        wait_until(lambda: not plane.api.get(definition).ok, what="the definition to be gone", deadline_s=SOON_S)
        plane.apply_crds()
