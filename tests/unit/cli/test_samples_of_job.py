"""`streamrl samples JOB`: run in the scheduler's container through an API server; on a real node: tests/e2e/test_smoke.py."""

import argparse
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from streamrl import names
from streamrl.errors import UserError
from streamrl_cli.cluster import api
from streamrl_cli.reporting import samples_command
from support.api_answers import write_kubeconfig
from support.jobs import simulated_job

SUCCESS = b'\x03{"status": "Success"}'
FAILURE = b'\x03{"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": [{"reason": "ExitCode", "message": "2"}]}}'


class Served:
    """An API server with one job, in whose pods every command says the same."""

    def __init__(self) -> None:
        self.says: Sequence[bytes] = ()
        self.refuses_with = 0
        self.asked: list[tuple[str, list[str]]] = []
        application = web.Application()
        application.router.add_get("/{path:.*}", self._answer)
        self.server = TestServer(application)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path.endswith("/rljobs/simulated"):
            return web.json_response(
                simulated_job()
                | {"metadata": {"name": "simulated", "namespace": "ml", "uid": "u", "resourceVersion": "1"}}
            )
        self.asked.append((request.path, request.query.getall("command")))
        if self.refuses_with:
            return web.Response(status=self.refuses_with)
        socket = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await socket.prepare(request)
        for message in self.says:
            await socket.send_bytes(message)
        await socket.close()
        return socket


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
