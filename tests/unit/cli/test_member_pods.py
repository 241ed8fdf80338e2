"""`streamrl status`, `logs` and `top` of a job with a pool in a member cluster, with an API server for each cluster."""

import argparse
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from streamrl import names
from streamrl.errors import UserError
from streamrl_cli import top
from streamrl_cli.cluster import logs, status
from support.jobs import simulated_job

LOST = "cluster east: no answer"


class OneCluster:
    """Serves objects by path, and the logs of its pods; all else is empty."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.objects: dict[str, dict[str, Any]] = {}
        self.pods: list[dict[str, Any]] = []
        self.selectors: list[str] = []
        application = web.Application()
        application.router.add_get("/{path:.*}", self._answer)
        self.server = TestServer(application)

    async def _answer(self, request: web.Request) -> web.Response:
        assert f"/namespaces/{self.namespace}/" in request.path
        if request.path in self.objects:
            return web.json_response(self.objects[request.path])
        last = request.path.rsplit("/", 1)[-1]
        if last == "log":
            return web.Response(text=f"{request.path.rsplit('/', 2)[-2]} speaks\n")
        if last == "status":
            return web.json_response({}, status=403)
        if last == "pods":
            self.selectors.append(request.query["labelSelector"])
        kinds = {"generatorpools": ("streamrl.io/v1alpha1", "GeneratorPoolList"), "pods": ("v1", "PodList")}
        version, kind = kinds.get(last, ("v1", "EventList"))
        items = self.pods if last == "pods" else []
        return web.json_response(
            {"apiVersion": version, "kind": kind, "metadata": {"resourceVersion": "1"}, "items": items}
        )


def pod(name: str, container: str, **labels: str) -> dict[str, Any]:
    status = {"name": container, "restartCount": 0, "state": {"running": {}}}
    return {
        "metadata": {"name": name, "namespace": "n", "uid": f"u-{name}", "resourceVersion": "1", "labels": labels},
        "spec": {"containers": [{"name": container}]},
        "status": {"phase": "Running", "containerStatuses": [status]},
    }


@pytest.fixture
def job() -> dict[str, Any]:
    """As it is at home."""
    job = simulated_job()
    job["spec"]["generators"][0]["clusterName"] = "east"
    conditions = [{"type": "ClusterUnreachable", "status": "True", "reason": "ClusterUnreachable", "message": LOST}]
    job |= {
        "metadata": {"name": "simulated", "namespace": "ml", "uid": "u-job", "resourceVersion": "1", "generation": 1},
        "status": {
            "conditions": conditions,
            "clusters": [{"name": "east", "clusterUid": "u-east", "namespace": "pools"}],
        },
    }
    return job


@pytest.fixture
async def config(tmp_path: Path, job: dict[str, Any]) -> AsyncIterator[tuple[OneCluster, str]]:
    """The member, and a kubeconfig with the contexts `here` and `far`."""
    home, member = OneCluster("ml"), OneCluster("pools")
    home.objects["/apis/streamrl.io/v1alpha1/namespaces/ml/rljobs/simulated"] = job
    home.pods = [pod("simulated-trainer-0", "trainer", **{names.LABEL_ROLE: "trainer"})]
    labels = {names.LABEL_ROLE: "generator", names.LABEL_POOL: "sim", names.LABEL_CLUSTER: "east"}
    member.pods = [pod("simulated-sim-0", "generator", **labels)]
    text: dict[str, Any] = {
        "current-context": "here",
        "contexts": [],
        "clusters": [],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }
    for name, cluster in (("here", home), ("far", member)):
        await cluster.server.start_server()
        url = str(cluster.server.make_url("")).rstrip("/")
        text["clusters"].append({"name": name, "cluster": {"server": url}})
        text["contexts"].append({"name": name, "context": {"cluster": name, "user": "u", "namespace": "ml"}})
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(text))
    yield member, f"--kubeconfig={path}"
    await home.server.close()
    await member.server.close()


async def said(module: ModuleType, arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    run = module.show_job if module is top else module.run
    await run(parser.parse_args(["simulated", *arguments]))


async def test_status_says_where_pools_are_and_what_cannot_be_reached(
    config: tuple[OneCluster, str], capsys: pytest.CaptureFixture[str]
) -> None:
    await said(status, [config[1]])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert f"not reached: {LOST}" in lines
    assert "east pools sim --member-context east=CONTEXT shows those that are there" in lines
    assert not [line for line in lines if line.startswith("simulated-sim-0")]


async def test_pods_there_are_read_in_the_name_of_the_person(
    config: tuple[OneCluster, str], capsys: pytest.CaptureFixture[str]
) -> None:
    member, kubeconfig = config
    await said(status, [kubeconfig, "--member-context", "far"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:3] for line in lines if line[:1] == ["simulated-sim-0"]] == [
        ["simulated-sim-0", "generator", "Running"]
    ]
    mine = {"streamrl.io/job=simulated", "streamrl.io/job-uid=u-job", "streamrl.io/cluster=east"}
    assert [set(one.split(",")) for one in member.selectors] == [mine]
    await said(logs, [kubeconfig, "--member-context", "east=far", "--role", "generators", "--role", "trainer"])
    assert set(capsys.readouterr().out.splitlines()) == {
        "[simulated-sim-0] simulated-sim-0 speaks",
        "[simulated-trainer-0/trainer] simulated-trainer-0 speaks",
    }


async def test_logs_of_a_pool_that_is_elsewhere_say_where(
    config: tuple[OneCluster, str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = "pool sim: has its pods in member cluster east; give --member-context east=CONTEXT, a context of the kubeconfig for it"
    await said(logs, [config[1]])
    told = capsys.readouterr()
    assert told.err.splitlines() == [line]
    assert told.out.splitlines() == ["[simulated-trainer-0/trainer] simulated-trainer-0 speaks"]
    with pytest.raises(UserError) as caught:
        await said(logs, [config[1], "--pool", "sim"])
    assert str(caught.value) == line
    await said(logs, [config[1], "--role", "trainer"])
    assert capsys.readouterr().err == ""


async def test_a_context_for_a_cluster_that_the_job_is_not_in_is_refused(config: tuple[OneCluster, str]) -> None:
    with pytest.raises(UserError, match="must name a member cluster that the job is in"):
        await said(status, [config[1], "--member-context", "west=far"])


async def test_top_says_what_cannot_be_reached(
    config: tuple[OneCluster, str], capsys: pytest.CaptureFixture[str]
) -> None:
    await said(top, [config[1]])
    assert f"not reached: {LOST}" in capsys.readouterr().out


async def test_a_trainer_that_is_elsewhere_is_shown_and_its_logs_say_where(
    config: tuple[OneCluster, str], job: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    del job["spec"]["generators"][0]["clusterName"]
    job["spec"]["trainer"]["clusterName"] = "east"
    await said(status, [config[1]])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "east pools trainer --member-context east=CONTEXT shows those that are there" in lines
    where = (
        "has its pods in member cluster east; give --member-context east=CONTEXT, a context of the kubeconfig for it"
    )
    await said(logs, [config[1]])
    assert capsys.readouterr().err.splitlines() == [f"trainer: {where}"]


async def test_top_reads_a_trainer_that_is_elsewhere_in_the_name_of_the_person(
    config: tuple[OneCluster, str], job: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    job["spec"]["trainer"]["clusterName"] = "east"
    member, kubeconfig = config
    page = f"/api/v1/namespaces/pools/pods/simulated-trainer-0:{names.PORT_SIGNALS}/proxy/status"
    member.objects[page] = {"queue": 4711, "generators": []}
    await said(top, [kubeconfig])
    assert "4711" not in capsys.readouterr().out
    await said(top, [kubeconfig, "--member-context", "far"])
    assert "4711" in capsys.readouterr().out
