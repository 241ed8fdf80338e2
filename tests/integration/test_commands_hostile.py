"""Commands over a cluster whose API server answers nonsense: one line, exit code 2, bounded memory."""

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from streamrl_operator.kube.kinds import POD, RLJOB
from support import hostile_server as hostile
from support.runs import DEADLINE_S

MOST_BYTES = 2**31
"""Address space of a command; its own code takes a fifth."""
ODD = [
    None,
    [],
    "x",
    7,
    {"metadata": None},
    {"metadata": {"name": []}},
    {"kind": "Status", "details": [], "message": {}},
]


async def command(folder: Path, server: str, *args: str) -> tuple[int, str, str]:
    """(exit code, output, errors) of the command line."""
    config = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }
    (folder / "kubeconfig").write_text(json.dumps(config))
    process = await asyncio.create_subprocess_exec(
        "prlimit",
        f"--as={MOST_BYTES}",
        sys.executable,
        "-m",
        "streamrl_cli.main",
        *args,
        f"--kubeconfig={folder / 'kubeconfig'}",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize(
    "answer",
    [
        lambda writer: hostile.endless(writer, 500),
        lambda writer: hostile.endless(writer, 403),
        lambda writer: hostile.endless(writer, 200, begin=b'{"items": "'),
        lambda writer: hostile.endless(writer, 200, begin=b'{"items": [', part=b"[]," * 20_000),
        lambda writer: hostile.bomb(writer, 200, encoding="gzip"),
        hostile.endless_headers,
        lambda writer: writer.write(hostile.whole(302, b"", more="Location: /elsewhere\r\n")),
        lambda writer: writer.write(hostile.whole(200, b"<html>")),
        lambda writer: writer.write(hostile.whole(500, b"\xff")),
        *(lambda writer, odd=odd: writer.write(hostile.whole(200, json.dumps(odd).encode())) for odd in ODD),
        *(lambda writer, odd=odd: writer.write(hostile.whole(422, json.dumps(odd).encode())) for odd in ODD),
    ],
)
async def test_nonsense_is_one_line(tmp_path: Path, answer: Callable[[asyncio.StreamWriter], object]) -> None:
    async with hostile.serve(lambda _, writer: answer(writer)) as server:
        code, out, err = await command(tmp_path, server, "status", "job")
    assert (code, out) == (2, ""), err
    assert len(err.splitlines()) == 1, err
    assert len(err) < 3000


async def test_a_log_without_an_end_of_line_is_shown_in_parts(tmp_path: Path) -> None:
    """A program that draws its progress on one line writes for days."""
    size = 2**25

    def answer(line: str, writer: asyncio.StreamWriter) -> None:
        path = line.split(" ")[1].partition("?")[0]
        metadata = {"namespace": "default", "uid": "u", "resourceVersion": "1"}
        job = {"apiVersion": RLJOB.api_version, "kind": RLJOB.kind, "metadata": metadata | {"name": "job"}}
        spec = {"containers": [{"name": "scheduler"}]}
        status = {"containerStatuses": [{"name": "scheduler", "state": {"running": {}}}]}
        pods = [{"metadata": metadata | {"name": "p"}, "spec": spec, "status": status}]
        if path.endswith("/log"):
            body = b"x" * size
        elif path.endswith(f"/{POD.plural}"):
            body = json.dumps({"metadata": {"resourceVersion": "1"}, "items": pods}).encode()
        else:
            body = json.dumps(job).encode()
        writer.write(hostile.whole(200, body))

    async with hostile.serve(answer) as server:
        code, out, err = await command(tmp_path, server, "logs", "job")
    assert (code, err) == (0, "")
    assert out.count("x") == size
    assert max(map(len, out.splitlines())) < 2**21
