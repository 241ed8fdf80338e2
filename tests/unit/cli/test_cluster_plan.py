"""`streamrl plan`: the operator's own objects, and the summary of them; and what a local run leaves out."""

import json
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from streamrl import names
from streamrl.errors import UserErrors
from streamrl_cli.jobfile import load_job
from streamrl_cli.local import unused_locally, unused_note
from support.command import streamrl
from support.tree import ROOT, python

EXAMPLE = ROOT / "examples/chain-sum-k8s.yaml"
GIVEN_MANY = (
    "spec.task.code={configMapName: mine}",
    "spec.generators[0].pod={image: own}",
    "spec.generators[0].scaling={external: {}}",
    "spec.trainer.disruption=Block",
    "spec.storage.checkpoints.claimName=mine",
    "spec.storage.journal.size=20Gi",
    "spec.failurePolicy.rules=[{name: a, action: FailJob}]",
    "spec.activeDeadlineSeconds=60",
    "spec.managedBy=kueue.x-k8s.io/multikueue",
)


def test_the_plan_of_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = streamrl(capsys, "plan", str(EXAMPLE))
    assert (outcome.code, outcome.err) == (0, [])
    lines = outcome.out
    assert lines[0] == "chain-sum: 13 objects and 4 Secrets"
    assert [" ".join(line.split()) for line in lines[3:9]] == [
        "SET PODS CONTAINER IMAGE REQUESTS LIMITS",
        "chain-sum-trainer 1 prepare localhost/streamrl/trainer:0.1.0 cpu 100m, memory 512Mi -",
        "tasks localhost/streamrl/trainer:0.1.0 cpu 100m, memory 512Mi -",
        "scheduler localhost/streamrl/trainer:0.1.0 cpu 100m, memory 512Mi -",
        "trainer localhost/streamrl/trainer:0.1.0 cpu 500m, memory 1Gi memory 3Gi",
        "chain-sum-cpu 1 generator localhost/streamrl/generator:0.1.0 cpu 500m, memory 1Gi memory 2Gi",
    ]
    text = "\n".join(lines)
    assert "chain-sum-checkpoints  1Gi   (the cluster's)  stays" in text
    assert "pool cpu: 1 to 3 generators" in text
    assert lines[-1] == "  all together: 2.00 to 4.00 an hour"
    weights = lines[lines.index("WEIGHTS, SECONDS FOR EACH VERSION") + 1 :]
    assert [line.split()[0] for line in weights[:3]] == ["PULL", "trainer", "pool"]
    assert weights[3] == "  a version: 925 kB"


def test_all_objects_come_as_yaml_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("plan", str(EXAMPLE), "--set", "spec.task.code=null", "-n", "ml", "--generator-image", "own:1")
    documents = list(YAML(typ="safe", pure=True).load_all("\n".join(streamrl(capsys, *arguments, "-o", "yaml").out)))
    assert json.loads("\n".join(streamrl(capsys, *arguments, "-o", "json").out))["items"] == documents
    by_name = {(one["kind"], one["metadata"]["name"]): one for one in documents}
    assert len(by_name) == len(documents) == 14
    assert {one["metadata"]["namespace"] for one in documents} == {"ml"}
    assert (
        by_name["ConfigMap", "chain-sum-code"]["data"]["chain_sum.py"] == (ROOT / "examples/chain_sum.py").read_text()
    )
    assert by_name["GeneratorPool", "chain-sum-cpu"]["spec"]["replicas"] == 1
    pod = by_name["StatefulSet", "chain-sum-cpu"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == "own:1"
    trainer = by_name["StatefulSet", "chain-sum-trainer"]["spec"]["template"]["spec"]
    assert {"name": "streamrl-code", "configMap": {"name": "chain-sum-code"}} in trainer["volumes"]


def test_a_claim_of_the_users_own_is_not_made(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = streamrl(capsys, "plan", str(EXAMPLE), "--set", "spec.storage.checkpoints.claimName=mine")
    volumes = outcome.out[outcome.out.index("VOLUMES") :][2:4]
    assert [line.split() for line in volumes] == [
        ["chain-sum-journal", "1Gi", "(the", "cluster's)", "deleted"],
        ["mine", "(yours)", "stays"],
    ]


def test_what_is_made_in_a_member_stands_beside_what_is_made_at_home(capsys: pytest.CaptureFixture[str]) -> None:
    far = ("plan", str(EXAMPLE), "--set", "spec.generators[0].clusterName=east")
    lines = streamrl(capsys, *far).out
    assert lines[0] == "chain-sum: 9 objects and 5 Secrets"
    assert "IN CLUSTER east: 7 objects and 1 Secret, owned by ConfigMap chain-sum-anchor" in lines
    home, there = (
        lines[: lines.index("IN CLUSTER east: 7 objects and 1 Secret, owned by ConfigMap chain-sum-anchor")],
        lines,
    )
    assert not [line for line in home if line.startswith("  chain-sum-cpu")]
    assert [line.split()[:3] for line in there if line.startswith("  chain-sum-cpu")] == [
        ["chain-sum-cpu", "1", "generator"]
    ]
    objects = json.loads("\n".join(streamrl(capsys, *far, "-o", "json").out))["items"]
    clusters = {(one["kind"], one["metadata"]["labels"].get(names.LABEL_CLUSTER)) for one in objects}
    assert {("StatefulSet", None), ("StatefulSet", "east"), ("GeneratorPool", None)} <= clusters
    assert ("GeneratorPool", "east") not in clusters
    assert not [one for one in objects if one["kind"] == "Secret"]


def test_a_trainer_in_a_member_has_its_volumes_there_and_is_dialled_from_home(
    capsys: pytest.CaptureFixture[str],
) -> None:
    far = ("plan", str(EXAMPLE), "--set", "spec.trainer.clusterName=east")
    lines = streamrl(capsys, *far).out
    begin = lines.index("IN CLUSTER east: 10 objects and 2 Secrets, owned by ConfigMap chain-sum-anchor")
    assert not [line for line in lines[:begin] if "chain-sum-trainer" in line or "chain-sum-journal" in line]
    assert [line.split()[-1] for line in lines[begin:] if line.startswith("  chain-sum-checkpoints")] == ["stays"]
    objects = json.loads("\n".join(streamrl(capsys, *far, "-o", "json").out))["items"]
    (home,) = (
        one for one in objects if one["kind"] == "StatefulSet" and names.LABEL_CLUSTER not in one["metadata"]["labels"]
    )
    (container,) = home["spec"]["template"]["spec"]["containers"]
    environment = {one["name"]: one.get("value") for one in container["env"]}
    assert environment["STREAMRL_SCHEDULER_ADDRESS"] == "scheduler.example:50051"
    owners = {
        one["metadata"]["name"]: "ownerReferences" in one["metadata"]
        for one in objects
        if one["kind"] == "PersistentVolumeClaim"
    }
    assert owners == {"chain-sum-journal": True, "chain-sum-checkpoints": False}
    (copied,) = (one for one in objects if one["metadata"]["name"] == "chain-sum-code")
    assert copied["metadata"]["labels"][names.LABEL_CLUSTER] == "east"


def test_a_given_rlcluster_says_what_is_made_where(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    spec = {
        "source": {"kubeconfigSecretName": "s"},
        "namespaces": [{"hub": "ml", "member": "pools"}],
        "exposure": {"nodePort": {"host": "192.0.2.7"}},
    }
    path = tmp_path / "east.json"
    path.write_text(
        json.dumps(
            {"apiVersion": "streamrl.io/v1alpha1", "kind": "RLCluster", "metadata": {"name": "east"}, "spec": spec}
        )
    )
    far = ("plan", str(EXAMPLE), "--set", "spec.generators[0].clusterName=east", "--rlcluster", str(path))
    objects = json.loads("\n".join(streamrl(capsys, *far, "-n", "ml", "-o", "json").out))["items"]
    there = {one["metadata"]["namespace"] for one in objects if names.LABEL_CLUSTER in one["metadata"]["labels"]}
    assert there == {"pools"}
    exposed = [one["spec"]["type"] for one in objects if one["metadata"]["name"] == "chain-sum-exposed"]
    assert exposed == ["NodePort"]
    refused = streamrl(capsys, *far, "-n", "other")
    assert (refused.code, refused.err) == (
        2,
        [
            "RLCluster east: must be a cluster that jobs of namespace other may use; map the namespace, or give --namespace"
        ],
    )


def test_every_mistake_of_the_file_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = streamrl(capsys, "plan", str(EXAMPLE), "--set", "spec.pipeline.steps=0", "--set", "spec.seed=x")
    assert (outcome.code, outcome.out, len(outcome.err)) == (2, [], 2)


@pytest.mark.parametrize("module", ["plan", "submit", "status", "logs", "scale", "cancel", "suspend"])
def test_no_command_loads_a_client_before_it_is_used(module: str) -> None:
    code = f"import sys, streamrl_cli.cluster.{module}; print({{'aiohttp', 'kopf', 'torch', 'cryptography'}} & set(sys.modules))"
    assert python(code).strip() == "set()"


def test_without_the_extra_one_line_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['aiohttp'] = None\n"
        "from streamrl_cli.main import main\n"
        "sys.stderr = sys.stdout\n"
        "print(main(['status', '--kubeconfig', sys.argv[1]]))"
    )
    assert python(code, str(tmp_path / "absent")).splitlines() == [
        "streamrl: commands over clusters need the package aiohttp, which is not installed; pip install 'streamrl[operator]'",
        "2",
    ]


def test_no_kubeconfig_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = streamrl(capsys, "status", "--kubeconfig", str(tmp_path / "absent"))
    line = f"kubeconfig: there is none at {tmp_path}/absent; give --kubeconfig, or set KUBECONFIG to a file that kubectl can use"
    assert (outcome.code, outcome.err) == (2, [line])


def test_a_local_run_names_the_fields_that_it_leaves_out() -> None:
    plain = load_job(ROOT / "tests/corpus/good/minimal.yaml", local=False)
    assert unused_note(plain) == ""
    job = load_job(ROOT / "examples/chain-sum.yaml", overrides=GIVEN_MANY, local=False)
    assert list(unused_locally(job)) == [
        "spec.task.code",
        "spec.generators[0].pod",
        "spec.generators[0].scaling.external",
        "spec.trainer.disruption",
        "spec.storage.checkpoints.claimName",
        "spec.storage.journal.size",
        "spec.failurePolicy.rules",
        "spec.managedBy",
        "spec.activeDeadlineSeconds",
    ]
    assert unused_note(job).startswith("not used by a local run (for Kubernetes): spec.task.code, ")
    assert "\n" not in unused_note(job)


def test_a_trainer_of_several_nodes_does_not_run_here(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text((ROOT / "tests/corpus/good/minimal.yaml").read_text() + "  trainer: {nodes: 2}\n")
    with pytest.raises(UserErrors) as caught:
        load_job(path)
    told = "spec.trainer.nodes: must be 1 in a local run: this is one machine, got 2; give processesPerNode instead"
    assert str(caught.value).endswith(told)
    assert load_job(path, local=False).spec.trainer.ranks == 2


def test_a_suspended_job_does_not_run_here_but_is_a_good_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text((ROOT / "tests/corpus/good/minimal.yaml").read_text() + "  suspend: true\n")
    with pytest.raises(UserErrors) as caught:
        load_job(path)
    assert str(caught.value).endswith(
        "spec.suspend: must be false in a local run: a suspended job has no processes, got true; "
        "remove it, or add --set spec.suspend=false"
    )
    assert load_job(path, overrides=["spec.suspend=false"]).spec.suspend is False
    assert streamrl(capsys, "run", str(path)).code == 2
    assert streamrl(capsys, "validate", "--spec-only", str(path)).code == 0
