"""What answers for a scheduler's `/numbers`: the operator and the runner read it, and what they then decide stays within the job's bounds.

The input is the whole HTTP answer: a pod's author may have written the program that gives it.
"""

import asyncio
import contextlib
import json
import math
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fuzz.harness import Door, Enter
from streamrl import keys
from streamrl.spec import parse_job
from streamrl.status import RLJobStatus
from streamrl_cli.runner.folder import create_folder
from streamrl_cli.runner.progress import fetch_status
from streamrl_operator.kube import answers
from streamrl_operator.kube.answers import KubeError
from streamrl_operator.kube.client import Client
from streamrl_operator.kube.rest_config import RestConfig
from streamrl_operator.planning import job_status
from streamrl_operator.planning.life import decide
from support.jobs import simulated_job
from support.observed_jobs import SETTINGS, all_ready, carried_out, job_document, observed, page

HOST = "127.0.0.1"
DEADLINE_S = 100.0
AUTO = {"auto": {"minReplicas": 1, "maxReplicas": 4, "initialReplicas": 2}}


@contextmanager
def opened() -> Iterator[Enter]:
    """A server that gives the input for an answer, and both readers."""
    answer = b""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
        writer.close()

    with asyncio.Runner() as runner, tempfile.TemporaryDirectory() as folder:
        server = runner.run(asyncio.start_server(serve, HOST, 0))
        port = server.sockets[0].getsockname()[1]
        run = create_folder(parse_job(simulated_job()), base_dir=Path(folder), parent=Path(folder))
        endpoint = run.file(keys.DIR_ENDPOINTS, "scheduler.json")
        endpoint.parent.mkdir(exist_ok=True)
        endpoint.write_text(json.dumps({"signals": f"{HOST}:{port}"}))

        async def read(data: bytes) -> tuple[Mapping[str, Any], str]:
            nonlocal answer
            answer = data
            async with asyncio.timeout(DEADLINE_S):
                mine = await fetch_status(run)
                assert mine is None or isinstance(mine, dict)
                async with Client(RestConfig(server=f"http://{HOST}:{port}", tls=None, token="t")) as client:
                    return await _read(client)

        def enter(data: bytes) -> str:
            numbers, refused = runner.run(read(data))
            return refused or _decided(numbers)

        yield enter
        server.close()
        runner.run(server.wait_closed())


async def _read(client: Client) -> tuple[Mapping[str, Any], str]:
    try:
        numbers = await client.read_page(namespace="n", service="s", port="signals", page="numbers", timeout_s=10.0)
    except KubeError as error:
        return {}, f"{type(error).__name__} {error.status} {error.reason}"
    return answers.read_page(numbers), ""


def _decided(numbers: Mapping[str, Any]) -> str:
    """Two looks at a job with this page: all that is written can be written, and sizes are within bounds."""
    look = observed(job_document(scaling=AUTO), pods=all_ready(), numbers=page())
    look = carried_out(look, decide(look, settings=SETTINGS), seconds=60)
    verdict = decide(replace(look, numbers=numbers), settings=SETTINGS)
    written = json.dumps(verdict.status, allow_nan=False, ensure_ascii=False).encode()
    RLJobStatus.model_validate_json(written)
    assert len(written) < 65536
    assert not re.search(rb"\d{18}", written), "an API server takes no number of 64 bits"
    assert all(0 <= size <= 4 for size in verdict.wanted.requested.values()), verdict.wanted.requested
    reasons = sorted({f"{one['type']}={one['reason']}" for one in verdict.status["conditions"]})
    return " ".join([*reasons, *sorted(verdict.status)])


def plant(patch: pytest.MonkeyPatch) -> None:
    """Numbers of any size."""
    patch.setattr(job_status, "_LARGEST", math.inf)


def _answer(body: object, *, status: str = "200 OK", headers: str = "") -> bytes:
    text = json.dumps(body)
    return f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n{headers}\r\n{text}".encode()


_GENERATOR = {
    "id": "generator-sim-0",
    "pool": "sim",
    "slots": 8,
    "active": 3,
    "waiting": 1,
    "version": 3,
    "tokens": 1000,
    "bubbles": {"busy": 5.0, "pipeline_no_samples": 1.0, "skew": 1.0},
    "wall_s": 7.0,
}
_TRAINER = {"id": "trainer-0", "bubbles": {"busy": 1.0, "pipeline_no_samples": 6.0}, "wall_s": 7.0}
_SPEED = {"sim": {"speed": "known", "step_s": {"1": 0.01, "8": 0.02}}}
_WARNED = [{"type": "TrainInferLogprobDiffHigh", "message": "the generators compute another policy"}]
_RUNNING = page(generators=[_GENERATOR], trainer=_TRAINER, dispatch={"pools": _SPEED}, warnings=_WARNED)
_ENDED = page(step=20, ended=True, result={"status": "succeeded", "steps": 20, "final_reward": 0.8, "checkpoint": "a"})
_FAILED = page(ended=True, result={"status": "failed", "reason": "every group was dropped"})

DOOR = Door(
    name="status_page",
    opened=opened,
    honest=[
        _answer(_RUNNING),
        _answer(_ENDED),
        _answer(_FAILED, headers="Connection: close\r\n"),
        _answer({}, status="503 Service Unavailable", headers="Retry-After: 5\r\n"),
        _answer({"kind": "Status", "reason": "NotFound", "message": "x", "code": 404}, status="404 Not Found"),
    ],
    words=[
        *(
            b"Content-Length: 7\r\n",
            b"Transfer-Encoding: chunked\r\n",
            b"Content-Encoding: gzip\r\n",
            b"Location: /x\r\n",
        ),
        *(b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 302 Found\r\n", b"HTTP/1.1 204 X\r\n", b"Retry-After: 99\r\n"),
        *(
            b'"ended": true',
            b'"result": ',
            b'"generators": [[]]',
            b'"scaling": null',
            b"ffffffff\r\n",
            b"Set-Cookie: a=b\r\n",
        ),
    ],
    most_input=2 << 20,
    most_held=80 << 20,  # a page of 1 MiB, all of it empty lists
    most_cpu_s=10.0,
    plant=plant,
)
