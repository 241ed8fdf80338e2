"""The operator's process against an API server that answers nonsense without end, and with a credential plug-in that gives nothing."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from streamrl_operator.kube.kinds import LEASE
from support import hostile_server as hostile
from support.operator_process import operator

METADATA = {"name": "l", "namespace": "n", "uid": "u", "resourceVersion": "1"}
FREE_LEASE = {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": METADATA, "spec": {}}
ODD_LIST = {"metadata": {"resourceVersion": "5"}, "items": [{"metadata": {"name": []}, "spec": 7}]}
NO_LIST = {"metadata": {"resourceVersion": "5"}, "items": None}
EVENTS = (
    {"type": "ERROR", "object": {"code": [], "message": {}}},
    {"type": "ADDED", "object": {"metadata": 1}},
    {"type": 7},
    [],
)
HOSTILE: tuple[Callable[[asyncio.StreamWriter], object], ...] = (
    lambda writer: hostile.endless(writer, 500),
    lambda writer: hostile.endless(writer, 403),
    lambda writer: hostile.endless(writer, 200, begin=b'{"items": [', part=b"[]," * 20_000),
    lambda writer: hostile.bomb(writer, 200, encoding="gzip"),
    lambda writer: hostile.bomb(writer, 410, encoding="deflate"),
    lambda writer: writer.write(hostile.whole(401, b'{"message": {}, "details": []}')),
    lambda writer: writer.write(hostile.whole(410, b'{"code": [], "reason": 7}')),
    lambda writer: writer.write(hostile.whole(429, b"\xff", more="Retry-After: \xb2\r\n")),
    lambda writer: writer.write(hostile.whole(200, json.dumps(ODD_LIST).encode())),
    hostile.endless_headers,
)


async def test_hostile_answers_end_nothing_and_take_no_memory(tmp_path: Path) -> None:
    asked = []

    def answer(line: str, writer: asyncio.StreamWriter) -> object:
        if LEASE.plural in line:
            return writer.write(hostile.whole(200, json.dumps(FREE_LEASE).encode()))
        asked.append(line)
        turn = len(asked) // 2
        if turn % 3 == 0:  # a list that is fine, and a watch of it that is not
            text = b"".join(json.dumps(one).encode() + b"\n" for one in EVENTS[turn % 4 :])
            return writer.write(hostile.whole(200, text if "watch=" in line else json.dumps(NO_LIST).encode()))
        return HOSTILE[turn % len(HOSTILE)](writer)

    async with hostile.serve(answer) as server, operator(tmp_path, server, {"token": "t"}) as running:
        await running.until(lambda: len(asked) > 100, what="100 requests")
        assert running.answers()
        assert await running.end() == 0


@pytest.mark.parametrize("broken", ["exit 1", "sleep 600"])
async def test_a_credential_plug_in_that_fails_is_told_and_tried_again(tmp_path: Path, broken: str) -> None:
    asked: list[str] = []

    def answer(line: str, writer: asyncio.StreamWriter) -> None:
        asked.append(line)
        writer.write(hostile.whole(500, b""))

    script = tmp_path / "plug-in"
    script.write_text(f"#!/bin/sh\necho run >> {tmp_path}/runs\n{broken}\n")
    script.chmod(0o700)
    plugin = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(script)}
    async with hostile.serve(answer) as server, operator(tmp_path, server, {"exec": plugin}) as running:
        runs, told = tmp_path / "runs", "plug-in" if broken == "exit 1" else "lease not renewed"
        await running.until(lambda: runs.exists() and told in running.log.read_text(), what="a word")
        assert running.answers()
        working = tmp_path / "working"
        working.write_text('#!/bin/sh\necho \'{"status": {"token": "t"}}\'\n')
        working.chmod(0o700)
        working.replace(script)
        await running.until(lambda: bool(asked), what="a request once the plug-in works")
        assert await running.end() == 0
