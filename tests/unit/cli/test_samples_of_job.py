"""`streamrl samples JOB`: run in the scheduler's container through an API server; on a real node: tests/e2e/test_smoke.py."""

import argparse
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from streamrl import names
from streamrl.errors import UserError
from streamrl.spec import parse_job
from streamrl_cli.cluster import api, reader
from streamrl_cli.reporting import samples_command
from support.api_answers import write_kubeconfig
from support.jobs import simulated_job
from support.planned import find, planned

SUCCESS = b'\x03{"status": "Success"}'
TRAINER = find(planned(parse_job(simulated_job())), "StatefulSet", "simulated-trainer")
TRAINER["metadata"] |= {"uid": "u-set", "resourceVersion": "2"}
META = {"name": "simulated", "namespace": "ml", "uid": "u", "resourceVersion": "1"}
RUNS = {"phase": "Running", "containerStatuses": [{"name": "scheduler", "state": {"running": {}}}]}
ENDED = {"status": {"conditions": [{"type": "Succeeded", "status": "True", "reason": "Completed", "message": ""}]}}
FAILURE = b'\x03{"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": [{"reason": "ExitCode", "message": "2"}]}}'


class Served:
    """An API server with one job, in whose pods every command says the same."""

    def __init__(self) -> None:
        self.says: Sequence[bytes] = ()
        self.refuses_with = 0
        self.asked: list[tuple[str, list[str]]] = []
        self.job = simulated_job() | {"metadata": META}
        self.pod_status: dict[str, Any] = RUNS
        self.pods: dict[str, Any] = {}
        """Those that the user has made, as they are."""
        self.changes: list[tuple[str, dict[str, Any]]] = []
        """Method, and the pod that was made or deleted."""
        application = web.Application()
        application.router.add_get("/{path:.*}", self._answer)
        application.router.add_route("*", "/{path:.*/pods/.*}", self._change)
        self.server = TestServer(application)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path.endswith("/rljobs/simulated"):
            return web.json_response(self.job)
        if request.path.endswith("/statefulsets/simulated-trainer"):
            return web.json_response(TRAINER)
        if (name := request.path.rpartition("/")[2]) in self.pods:
            return web.json_response(self.pods[name] | {"status": self.pod_status})
        self.asked.append((request.path, request.query.getall("command")))
        if self.refuses_with:
            return web.Response(status=self.refuses_with)
        socket = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await socket.prepare(request)
        for message in self.says:
            await socket.send_bytes(message)
        await socket.close()
        return socket

    async def _change(self, request: web.Request) -> web.StreamResponse:
        name, body = request.path.rpartition("/")[2], await request.json()
        self.changes.append((request.method, body))
        if request.method == "DELETE":
            return web.json_response(self.pods.pop(name))
        body["metadata"] |= {"uid": "u-reader", "resourceVersion": "7"}
        self.pods[name] = body
        return web.json_response(body)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    made = Served()
    await made.server.start_server()
    yield made
    await made.server.close()


async def samples(served: Served, tmp_path: Path, *flags: str) -> int:
    parser = argparse.ArgumentParser()
    samples_command.add_arguments(parser)
    arguments = parser.parse_args(["simulated", f"--kubeconfig={write_kubeconfig(served.server, tmp_path)}", *flags])
    return await samples_command.show_job(arguments)


async def test_the_command_is_run_where_the_samples_lie(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served.says = (b"\x01best: st", b"\x01ep 2\n  re\x1bward", b"\x02a note\n", b"\x01 1\n\nend", SUCCESS)
    assert await samples(served, tmp_path, "--step=2", "--worst", "--best", "--full") == 0
    path = "/api/v1/namespaces/ml/pods/simulated-trainer-0/exec"
    flags = ["--step=2", "--full", "--count=1", "--worst", "--best"]
    assert served.asked == [(path, ["python", "-m", "streamrl_cli.main", "samples", names.DIR_RUN, *flags])]
    told = capsys.readouterr()
    assert (told.out.splitlines(), told.err) == (["best: step 2", "  re\\x1bward 1", "", "end"], "a note\n")


async def test_of_a_job_that_has_ended_they_are_read_in_a_pod_that_is_gone_afterwards(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served.job |= ENDED
    served.says = (b"\x01best: step 2\n", SUCCESS)
    assert await samples(served, tmp_path, "--best") == 0
    assert capsys.readouterr().out == "best: step 2\n"
    (made, pod), (deleted, body) = served.changes
    assert (made, deleted, body["preconditions"]) == ("PATCH", "DELETE", {"uid": "u-reader"})
    ((path, command),) = served.asked
    assert path == f"/api/v1/namespaces/ml/pods/{pod['metadata']['name']}/exec"
    assert command[:5] == ["python", "-m", "streamrl_cli.main", "samples", names.DIR_RUN]
    assert [one["uid"] for one in pod["metadata"]["ownerReferences"]] == ["u"]
    assert not any(label.startswith("streamrl.io/") for label in pod["metadata"]["labels"])
    volumes = {one["name"]: one for one in pod["spec"]["volumes"]}
    mounted = {one["mountPath"]: volumes[one["name"]] for one in pod["spec"]["containers"][0]["volumeMounts"]}
    assert mounted[names.DIR_RUN]["persistentVolumeClaim"] == {"claimName": "simulated-journal"}
    assert "/tmp" in mounted
    assert {kind for one in volumes.values() for kind in one} == {"name", "emptyDir", "persistentVolumeClaim"}
    assert "simulated-checkpoints" not in str(volumes), "another job may go on from it"


async def test_a_pod_that_cannot_start_is_one_line_and_goes(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "START_S", 0.0)
    served.job |= ENDED
    gone = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no claim"}
    served.pod_status = {"phase": "Pending", "conditions": [gone]}
    with pytest.raises(UserError, match=r"does not start to read the job's volume: "):
        await samples(served, tmp_path)
    assert [method for method, _ in served.changes] == ["PATCH", "DELETE"]


async def test_a_trainer_in_a_member_has_its_samples_there(served: Served, tmp_path: Path) -> None:
    served.job["spec"]["trainer"]["clusterName"] = "east"
    with pytest.raises(UserError, match=r"has its samples in member cluster east; there: kubectl exec simulated-trai"):
        await samples(served, tmp_path)


async def test_a_long_line_is_one_line(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    served.says = (*[b"\x01" + b"x" * 2**20] * 3, b"\x01y\nend\n", SUCCESS)
    assert await samples(served, tmp_path, "--json") == 0
    first, second = capsys.readouterr().out.splitlines()
    assert (first == "x" * (3 * 2**20) + "y", second) == (True, "end")


async def test_a_line_without_end_is_refused_in_one_line(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "LONGEST_LINE_BYTES", 2**20)
    served.says = (b"\x01" + b"x" * 2**20, b"\x01y", SUCCESS)
    with pytest.raises(UserError, match=r"pods/simulated-trainer-0: .* a line of more than 1 MiB"):
        await samples(served, tmp_path, "--json")


async def test_its_exit_code_is_ours(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    served.says = (b"\x02step 9: has no samples\n", FAILURE)
    assert await samples(served, tmp_path, "--step=9") == 2
    assert capsys.readouterr().err == "step 9: has no samples\n"


@pytest.mark.parametrize(
    ("says", "code", "line"),
    [
        (
            (),
            403,
            "may not run commands in pods of namespace ml; ask for a role with `create` and `get` of `pods/exec`",
        ),
        ((), 404, "pods/simulated-trainer-0: runs no commands (404): the container is not there yet or no more"),
        ((), 500, "pods/simulated-trainer-0: runs no commands (500): the container is not there yet or no more"),
        ((), 503, "pods/simulated-trainer-0: the API server refused to exec it (503): status 503"),
        ((b"\x01best",), 0, "cannot be reached (what it says to exec pods/simulated-trainer-0 cannot be used: "),
        ((b'\x03{"status": "Failure", "message": "container gone"}',), 0, "cannot be used: container gone)"),
    ],
)
async def test_what_goes_wrong_is_one_line(
    served: Served, tmp_path: Path, says: Sequence[bytes], code: int, line: str
) -> None:
    served.says, served.refuses_with = says, code
    with pytest.raises(UserError) as caught:
        await samples(served, tmp_path)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)
