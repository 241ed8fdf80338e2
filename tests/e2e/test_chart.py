"""The front door, as the documentation has it: helm install, kubectl apply of the example, real workers in pods, to the end.

The operator is a pod of the image that Dockerfile.operator makes; trainer, scheduler and generators train a real model with torch,
as another user than root, with a read-only root, NetworkPolicies enforced, over mTLS.
"""

import json
import sys
import time
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.harness import pods
from cluster.harness.cluster import NodeCluster
from e2e.jobs import chain_sum, chain_sum_code
from e2e.release import NAME, NAMESPACE, READY_S, Release
from e2e.stage import Stage
from streamrl import names
from streamrl_workers.trainer.checkpoint import CheckpointStore
from support.chart import CHART

pytestmark = [pytest.mark.node, pytest.mark.e2e, pytest.mark.timeout(2400)]

STEPS = 20
EVALUATE_EVERY = 10
RUN_S = 1800.0
"""Warm-up and 20 steps take a few minutes on two idle cores; these are shared with a whole cluster."""


def test_helm_test_says_that_it_works(release: Release) -> None:
    release.helm("test", NAME, "--namespace", NAMESPACE, "--timeout", "110s")


def test_a_second_release_comes_grows_and_goes(release: Release, node_cluster: NodeCluster) -> None:
    """Beside the first, for one namespace alone; its uninstall hook runs as a pod."""
    node, home = node_cluster.the_node, "other-system"
    pods.make_namespace(node.objects, home, {"pod-security.kubernetes.io/enforce": "restricted"})
    release.helm(
        *(
            "install",
            "other",
            str(CHART),
            "--namespace",
            home,
            "--set",
            f"crds.install=false,watchNamespaces={{{home}}}",
        ),
        *("--values", "-"),
        stdin=json.dumps(release.values()),
    )
    pods.wait_deployment(node.objects, home, "other-streamrl", deadline_s=READY_S)
    more = ("--reuse-values", "--set", "replicas=2")
    release.helm("upgrade", "other", str(CHART), "--namespace", home, *more)
    pods.wait_deployment(node.objects, home, "other-streamrl", deadline_s=READY_S)
    lease = node.objects.get(f"/apis/coordination.k8s.io/v1/namespaces/{home}/leases/streamrl-operator")
    assert lease is not None and lease["spec"]["holderIdentity"].startswith("other-streamrl-")
    release.helm("uninstall", "other", "--namespace", home, "--timeout", "110s", "--wait")
    left = node_cluster.get(
        "deployments,pods,jobs,services,roles,rolebindings,networkpolicies,pdb", "--namespace", home
    )
    assert [one["metadata"]["name"] for one in left["items"] if "deletionTimestamp" not in one["metadata"]] == []
    assert node_cluster.get("crd", "rljobs.streamrl.io")


def test_the_example_learns_and_ends_and_its_checkpoint_loads(release: Release, stage: Stage) -> None:
    stage.apply(chain_sum_code(stage.namespace), chain_sum(steps=STEPS, evaluate_every=EVALUATE_EVERY))
    begun = time.monotonic()
    stage.wait_step("chain-sum", 2, deadline_s=RUN_S)
    assert_confined(stage, "chain-sum")
    stage.wait_for(lambda: set(SHOWN) <= set(stage.status("chain-sum")), f"all of {SHOWN} in status", job="chain-sum")
    running = stage.status("chain-sum")
    assert running["bubbles"].keys() == {"pipelinePercent", "skewPercent"}
    table = stage.kubectl("get", "rljobs")
    status = stage.wait_succeeded("chain-sum", deadline_s=RUN_S)
    rewards = stage.rewards("chain-sum")
    sys.stderr.write(f"{table}{stage.kubectl('get', 'rljobs')}{time.monotonic() - begun:.0f} s; {rewards}\n")
    assert status["step"] == STEPS
    assert rewards[-1] > rewards[0] + 0.05, rewards
    assert status["reward"] == pytest.approx(rewards[-1], abs=1e-3)
    stage.assert_exact("chain-sum")
    assert_loads(stage, status)


SHOWN = ("step", "reward", "queue", "bubbles", "tokensPerSecond")


def assert_confined(stage: Stage, job: str) -> None:
    """What a person who guards the cluster would look at, as it runs."""
    for name, pod in stage.pods(job).items():
        for one in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
            security = one["securityContext"]
            assert security["readOnlyRootFilesystem"], name
            assert security["capabilities"] == {"drop": ["ALL"]}, name
        told = stage.kubectl("exec", name, "--", "python", "-c", LOOK)
        assert told.split() == ["10001", "0000000000000000", "True", "True"], f"{name}: {told}"
    policies = {one["metadata"]["name"] for one in stage.list("networkpolicies")}
    assert policies == {names.trainer(job), names.pool(job, "cpu")}


LOOK = """
import os, pathlib, re
print(os.getuid())
print(re.search("CapEff:\\\\s*(\\\\w+)", pathlib.Path("/proc/self/status").read_text())[1])
def refused(path):
    try:
        pathlib.Path(path).write_text("x")
    except OSError:
        return True
    return False
print(refused("/usr/x"), not pathlib.Path("/var/run/secrets/kubernetes.io").exists())
"""


def assert_loads(stage: Stage, status: dict[str, Any]) -> None:
    """The checkpoint is a whole one, and the trained model is one that transformers reads."""
    volume = stage.nodes.the_node.volume_path(stage.namespace, names.checkpoints_claim("chain-sum"))
    store = stage.store("chain-sum", uid=stage.uid("chain-sum"))
    found = CheckpointStore(store / "checkpoints", keep_last=1).newest()
    assert found is not None and found.meta.step == status["step"]
    assert (volume / status["checkpointPath"]).samefile(found.directory)
    model = AutoModelForCausalLM.from_pretrained(store / "model")
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3]])).logits
    assert torch.isfinite(logits).all()
