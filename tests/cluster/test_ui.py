"""The page of jobs at a real API server, with the rights that the chart gives it, and no others."""

import argparse
import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from cluster.command_fixtures import stored
from cluster.harness.api import GROUP
from cluster.harness.base import Cluster
from cluster.harness.processes import wait_until
from cluster.test_cli import STATUS, condition, make_event, make_pool
from streamrl.errors import UserError
from streamrl_cli.cluster.api import ApiClient, connect
from streamrl_cli.ui.cluster_jobs import ClusterJobs
from streamrl_cli.ui.job_pages import JobPages
from streamrl_operator.kube.kinds import RLJOB, SECRET
from streamrl_pages.website import Asked
from support.chart import CHART, runner

ACCOUNT = "rl-streamrl-ui"
GRANTED_S = 60.0


@pytest.fixture
def account(control_plane: Cluster, namespace: str, tmp_path: Path) -> Iterator[Path]:
    """A kubeconfig of the page's ServiceAccount, of a release that watches the test's namespace."""
    helm = runner(tmp_path / "helm", control_plane.kubeconfig)
    values = f"crds.install=false,ui.enabled=true,ui.tokenSecret=page,watchNamespaces={{{namespace}}}"
    helm("install", "rl", str(CHART), "--namespace", namespace, "--set", values)
    user = f"--as=system:serviceaccount:{namespace}:{ACCOUNT}"
    wait_until(
        lambda: (
            control_plane.kubectl("auth", "can-i", "list", "rljobs", user, "-n", namespace, check=False).returncode == 0
        ),
        what="the API server to grant the page its rights",
        deadline_s=GRANTED_S,
    )
    yield control_plane.kubeconfig_of_account(namespace, ACCOUNT)
    helm("uninstall", "rl", "--namespace", namespace, "--no-hooks")


@pytest.fixture
def patch_job(
    control_plane: Cluster, namespace: str, job_file: Path, patch: Callable[..., dict[str, Any]]
) -> Callable[..., dict[str, Any]]:
    """A job, and what changes it."""
    document = YAML(typ="safe", pure=True).load(job_file.read_text())
    control_plane.api.create(f"{GROUP}/namespaces/{namespace}/rljobs", document).expect()
    return patch


@pytest.fixture
async def cluster(account: Path, namespace: str) -> AsyncIterator[ApiClient]:
    async with connect(argparse.Namespace(kubeconfig=account, context=None, namespace=namespace)) as found:
        yield found


async def test_the_account_sees_jobs_and_writes_nothing(
    control_plane: Cluster,
    namespace: str,
    patch_job: Callable[..., dict[str, Any]],
    cluster: ApiClient,
) -> None:
    patch_job(
        "/status", status=STATUS | {"conditions": [condition("Ready", holds=True, reason="Running", message="3 of 3")]}
    )
    make_pool(control_plane, namespace, history=True)
    make_event(control_plane, namespace, stored(control_plane, namespace, "rljobs/sum"))
    jobs = ClusterJobs(cluster, namespaces=[namespace])
    pages = JobPages(jobs)
    table = await asyncio.to_thread(pages.html, "/", Asked(parts={}, query={}), state="s")
    for text in (f"{namespace}/sum", "42/100", "True: Running", "fixed 1/2, outside 1/1", "12 % pipeline, 3 % skew"):
        assert text in table
    where = Asked(parts={"namespace": namespace, "name": "sum"}, query={})
    page = await asyncio.to_thread(pages.html, "/jobs/{namespace}/{name}", where, state="s")
    for text in ("3 of 3", "queue of 90 samples", "generator sum-fixed-1 was evicted", "The scheduler is not reached"):
        assert text in page
    assert 'class="fault"' not in table + page
    await jobs.close()
    stranger = f"user system:serviceaccount:{namespace}:{ACCOUNT} may not"
    for attempt in (
        cluster.merge(RLJOB, "sum", {"spec": {"suspend": True}}),
        cluster.apply(RLJOB, {"apiVersion": RLJOB.api_version, "kind": "RLJob", "metadata": {"name": "new"}}),
        cluster.delete(stored(control_plane, namespace, "rljobs/sum"), RLJOB),
        cluster.find(SECRET),
        cluster.within("").find(RLJOB),
    ):
        with pytest.raises(UserError, match=stranger):
            await attempt


def test_the_account_may_list_three_kinds_and_no_more(control_plane: Cluster, namespace: str, account: Path) -> None:
    del account
    user = f"--as=system:serviceaccount:{namespace}:{ACCOUNT}"
    text = control_plane.kubectl("auth", "can-i", "--list", "--no-headers", user, "-n", namespace).stdout
    ours = {
        what
        for what in (line.split()[0] for line in text.splitlines())
        if what.endswith(".streamrl.io") or what == "events"
    }
    assert ours == {"rljobs.streamrl.io", "generatorpools.streamrl.io", "events"}
    for line in text.splitlines():
        if line.split()[0] in ours:
            assert line.split()[-1] == "[list]"
    for what in ("get pods/proxy", "get secrets", "list pods", "create events"):
        asked = control_plane.kubectl("auth", "can-i", *what.split(), user, "-n", namespace, check=False)
        assert asked.stdout.strip() == "no", what
