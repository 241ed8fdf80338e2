"""The chart's page as a pod of the operator's image: behind its token it lists the jobs, by a ServiceAccount that only reads."""

import base64
import json
from collections.abc import Iterator

import httpx
import pytest

from cluster.harness import pods
from cluster.harness.processes import wait_until
from e2e.jobs import simulated
from e2e.release import NAME, NAMESPACE, READY_S, Release
from e2e.stage import SOON_S, Stage
from support.chart import CHART

pytestmark = [pytest.mark.node, pytest.mark.e2e, pytest.mark.timeout(900)]

JOB, PAGE, SECRET = "shown", f"{NAME}-ui", "page"
TOKEN = "the token of the test's page"


@pytest.fixture
def address(release: Release) -> Iterator[str]:
    """Of the page's Service; afterwards the release has none, as before."""
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET, "namespace": NAMESPACE}}
    data = {"token": base64.b64encode(TOKEN.encode()).decode()}
    release.cluster.kubectl("apply", "-f", "-", stdin=json.dumps({**secret, "data": data}))
    try:
        upgrade(release, f"ui.enabled=true,ui.tokenSecret={SECRET}")
        objects = release.cluster.the_node.objects
        pods.wait_deployment(objects, NAMESPACE, PAGE, deadline_s=READY_S)
        service = objects.get(f"/api/v1/namespaces/{NAMESPACE}/services/{PAGE}")
        assert service is not None
        (port,) = service["spec"]["ports"]
        yield f"http://{service['spec']['clusterIP']}:{port['port']}/"
    finally:  # the release is other tests' too
        upgrade(release, "ui.enabled=false")
        release.cluster.kubectl("delete", "secret", SECRET, "--namespace", NAMESPACE)


def upgrade(release: Release, values: str) -> None:
    release.helm("upgrade", NAME, str(CHART), "--namespace", NAMESPACE, "--reuse-values", "--set", values)


def answer(address: str, **headers: str) -> tuple[int, str]:
    """Code and text; nothing while the node has no rule for the Service yet."""
    try:
        found = httpx.get(address, headers=headers, timeout=30, trust_env=False)
    except httpx.TransportError:
        return 0, ""
    return found.status_code, found.text


def test_the_page_lists_jobs_and_its_account_only_reads(address: str, stage: Stage, release: Release) -> None:
    job = simulated(JOB)
    job["spec"]["suspend"] = True
    stage.apply(job)
    wait_until(lambda: answer(address)[0] == 401, what="the page to ask for a token", deadline_s=SOON_S)
    allowed = {"Authorization": f"Bearer {TOKEN}"}
    wait_until(lambda: f"{stage.namespace}/{JOB}" in answer(address, **allowed)[1], what="the job", deadline_s=SOON_S)
    account = f"--as=system:serviceaccount:{NAMESPACE}:{PAGE}"
    told = release.cluster.kubectl("auth", "can-i", "--list", account, "--namespace", stage.namespace).stdout
    (line,) = (line for line in told.splitlines() if line.startswith("rljobs.streamrl.io"))
    assert line.endswith("[list]")
    for verb in ("create", "update", "patch", "delete"):
        asked = release.cluster.kubectl("auth", "can-i", verb, "rljobs", account, "-n", stage.namespace, check=False)
        assert (asked.returncode, asked.stdout.split()[:1]) == (1, ["no"]), asked
