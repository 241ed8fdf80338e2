"""Text that others wrote, as commands show it: nothing in it moves a cursor, colours, rings or forges a line."""

import asyncio
import io
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console
from ruamel.yaml import YAML

from streamrl import names
from streamrl.errors import UserError, UserErrors
from streamrl.spec import parse_job
from streamrl.text import LineFormatter, plain, say
from streamrl_cli.runner.folder import create_folder
from streamrl_cli.runner.progress import RunProgress
from streamrl_cli.runner.view import LiveView
from streamrl_cli.runner.workers import failed
from streamrl_operator.kube.kinds import RLJOB
from streamrl_operator.main import JsonFormatter
from support.command import streamrl
from support.hostile import ACTS, CONTROLS
from support.jobs import simulated_job

TEXT = f"{CONTROLS}\nforged: line\t\u2028\x85"


# ---- a cluster whose objects are full of it


def objects() -> dict[str, list[dict[str, Any]]]:
    """By plural."""
    at = "2026-01-02T11:50:00Z"
    meta = {"namespace": "ml", "creationTimestamp": at, "resourceVersion": "1", "uid": "u"}
    condition = {"type": "Ready", "status": "False", "reason": TEXT, "message": TEXT, "lastTransitionTime": at}
    change = {"time": at, "fromReplicas": 1, "toReplicas": 2, "reason": TEXT}
    job = {
        "metadata": meta | {"name": "sum", "annotations": {TEXT: TEXT}},
        "spec": {"pipeline": {"steps": 9}, "failurePolicy": {"maxRestarts": 3}},
        "status": {"conditions": [condition], "step": 1, "checkpointPath": TEXT},
    }
    pool = {
        "metadata": meta | {"name": "sum-math"},
        "spec": {"poolName": TEXT, "scaling": TEXT, "replicas": 1},
        "status": {"reason": TEXT, "scalingHistory": [change]},
    }
    waiting = {"name": names.CONTAINER_SCHEDULER, "restartCount": 1, "state": {"waiting": {"reason": TEXT}}}
    pod = {
        "metadata": meta | {"name": f"p{TEXT}", "labels": {names.LABEL_ROLE: TEXT}},
        "spec": {"nodeName": TEXT, "containers": [{"name": names.CONTAINER_SCHEDULER}]},
        "status": {"phase": TEXT, "containerStatuses": [waiting]},
    }
    event = {"metadata": meta | {"name": "e"}, "type": TEXT, "reason": TEXT, "message": TEXT, "eventTime": at}
    return {"rljobs": [job], "generatorpools": [pool], "pods": [pod], "events": [event]}


async def answer(request: web.Request) -> web.Response:
    """Any read, of that cluster; writes are refused."""
    known, parts = objects(), request.path.split("/")
    if request.method != "GET":
        return web.json_response({"message": TEXT, "code": 500}, status=500)
    if parts[-1] == "log":
        return web.Response(body=f"{TEXT}\n\x1b[2Jgone\n".encode(errors="surrogatepass") + b"\xff\xfe\x9b\n")
    if parts[-1] in known:
        return web.json_response({"metadata": {"resourceVersion": "1"}, "items": known[parts[-1]]})
    if parts[-1] == "sum":
        return web.json_response({"apiVersion": RLJOB.api_version, "kind": RLJOB.kind, **known["rljobs"][0]})
    return web.json_response({"message": TEXT, "details": {"kind": TEXT}, "code": 404}, status=403)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """The path of a kubeconfig."""
    loop, ready, port = asyncio.new_event_loop(), threading.Event(), []

    async def serve() -> None:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port.append(runner.addresses[0][1])
        ready.set()
        await stop.wait()
        await runner.cleanup()

    stop = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(120), "the server listens within 120 s"
    config = {
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port[0]}"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c", "namespace": "ml"}}],
        "users": [{"name": "c", "user": {"token": "t"}}],
    }
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(config))
    yield str(path)
    loop.call_soon_threadsafe(stop.set)
    thread.join(120)
    loop.close()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("status",), 0),
        (("status", "sum"), 0),
        (("status", "sum", "--output", "json"), 0),
        (("status", "sum", "--output", "yaml"), 0),
        (("status", "other"), 2),
        (("logs", "sum"), 0),
        (("suspend", "sum"), 2),
        (("scale", "sum", "--pool", "math", "--replicas", "2"), 2),
        (("cancel", "sum", "--yes"), 2),
    ],
)
def test_no_command_on_a_cluster_writes_what_a_terminal_acts_on(
    arguments: tuple[str, ...], code: int, cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = streamrl(capsys, *arguments, "--kubeconfig", cluster)
    lines = [*outcome.out, *outcome.err]
    assert (outcome.code, bool(outcome.out)) == (code, code == 0), outcome
    assert not [line for line in lines if ACTS.search(line)]
    assert not [line for line in lines if line.lstrip().startswith("forged") and "--output" not in arguments]


def test_an_object_as_yaml_reads_as_it_was(cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = streamrl(capsys, "status", "sum", "--output", "yaml", "--kubeconfig", cluster)
    assert outcome.code == 0, outcome
    found = YAML(typ="safe", pure=True).load("\n".join(outcome.out))
    assert found["status"] == objects()["rljobs"][0]["status"]
    assert found["metadata"]["annotations"] == {TEXT: TEXT}


# ---- files


@pytest.mark.parametrize("command", ["validate", "plan", "run", "simulate", "profile"])
def test_keys_and_values_of_a_file_are_shown_escaped(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = simulated_job()
    job["spec"][TEXT] = TEXT
    job["metadata"]["name"] = TEXT
    job["kind"] = TEXT
    path = tmp_path / f"{CONTROLS}.yaml"
    path.write_text(json.dumps(job))
    outcome = streamrl(capsys, command, str(path))
    assert outcome.code == 2
    assert not [line for line in outcome.err if ACTS.search(line) or line.startswith("forged")]


@pytest.mark.parametrize("arguments", [(TEXT,), ("explain", TEXT), ("validate", TEXT), ("validate", f"--{TEXT}")])
def test_arguments_are_shown_escaped(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    outcome = streamrl(capsys, *arguments)
    assert (outcome.code, len(outcome.err)) == (2, 1)
    assert not ACTS.search(outcome.err[0])


# ---- a run


async def test_the_live_view_shows_neither_markup_nor_controls(tmp_path: Path) -> None:
    folder = create_folder(
        parse_job(simulated_job()), base_dir=tmp_path, parent=tmp_path, path=tmp_path / "[bold red]r[/]"
    )
    progress, out = RunProgress(folder=folder), io.StringIO()
    progress.status = {"generators": [{"id": f"[blink]{CONTROLS}", "pool": "sim", "bubbles": {}, "wall_s": 0.0}]}
    progress.score_failures.update({f"[blink]{CONTROLS}": 2})
    with LiveView(progress, console=Console(file=out, width=240)) as view:
        view.update([], [])
        view.say(f"[bold]{CONTROLS}")
    said = out.getvalue()
    assert "[bold red]r[/]" in said
    assert said.count("[blink]a\\x1b[31m") == 2
    assert "[bold]a\\x1b[31m" in said
    assert "\x07" not in said


def test_what_a_worker_said_last_is_one_plain_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "generator.log"
    log.write_bytes(b"fine\n" + CONTROLS.replace("\r", "").encode() + b"\xff\n")
    say(f"streamrl: {failed(reason='generator ended', exit_code=1, log=log)}")
    written = capsys.readouterr().err
    assert written.startswith("streamrl: generator ended: a\\x1b[31m\\x07\\x08\\x7f")
    assert not ACTS.search(written)


@pytest.mark.parametrize("formatter", [LineFormatter("%(name)s: %(message)s"), JsonFormatter()])
def test_logs_are_plain(formatter: logging.Formatter) -> None:
    record = logging.LogRecord("x", logging.INFO, "f.py", 1, "peer said %s", (CONTROLS,), None)
    line = formatter.format(record)
    assert not ACTS.search(line)
    if isinstance(formatter, JsonFormatter):
        assert json.loads(line)["message"] == f"peer said {CONTROLS}"


# ---- the rule


def test_an_error_is_one_plain_line_of_bounded_length() -> None:
    error = UserError(field=TEXT * 1000, rule=TEXT, got=TEXT, fix=TEXT)
    [line] = UserErrors([error]).lines
    assert not ACTS.search(line)
    assert "\n" not in line
    assert len(line) < 20_000


def test_all_but_what_is_acted_on_stays() -> None:
    text = "tab\there, ü, 漢字, עברית, 👩‍🔬, \u00a0, e\u0301, →"
    marks = (
        "soft\u00adhyphen, ខ្ញុំ\u200bទៅ, \u061cعربي, ᠭᠠ\u180e, \u200eA\u200f, 🏴\U000e0067\U000e0062\U000e0065\U000e007f"
    )
    assert plain(text + marks) == text + marks
    assert plain("\x1b\x00\x7f\x9b\u202a\u202e\u2028\u2066\u2069\u2060\ufeff\ufff9\ud800\U000e0001") == (
        r"\x1b\x00\x7f\x9b\u202a\u202e\u2028\u2066\u2069\u2060\ufeff\ufff9\ud800\U000e0001"
    )
