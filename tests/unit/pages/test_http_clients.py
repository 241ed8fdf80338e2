"""Every HTTP client of ours against servers that mean ill: it ends by its deadline, within its memory, with its own error, and takes its token nowhere.

A new client gets a row in `CLIENTS`; ruff's `banned-api` keeps libraries of HTTP out of all modules but those that hold one.
"""

import asyncio
import os
import ssl
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from pathlib import Path

import aiohttp
import pytest

from streamrl.errors import UserError
from streamrl.proto import stream_pb2 as pb
from streamrl_cli.cluster.api import ApiClient
from streamrl_operator.kube.answers import KubeError
from streamrl_operator.kube.client import Client
from streamrl_operator.kube.connections import ApiConnection
from streamrl_operator.kube.kinds import RLJOB, SERVICE
from streamrl_operator.kube.oidc import Oidc, Provider
from streamrl_operator.kube.rest_config import RestConfig
from streamrl_pages.http_client import session
from streamrl_pages.http_fetch import FetchError, OversizeError, fetch, one_line
from streamrl_workers.rewards.base import Item
from streamrl_workers.rewards.endpoint import EndpointError
from streamrl_workers.rewards.registry import make_parts
from streamrl_workers.weights.address import Route, WeightsError
from support import hostile_server as hostile
from support.certificates import Authority
from support.task_jobs import make_task
from support.tree import ROOT
from support.weight_servers import pull_along

TIMEOUT_S = 0.5
LATE_S = 20.0
"""The deadline, and what a busy machine adds; what has none waits for ever."""
MOST_MIB = 160
"""Growth of all exchanges with one client, which run at once: two answers that are cut at 16 MiB, and their copies, are the most of it."""
TOKEN = "of-ours-alone"
FAR = 10**20

Answer = Callable[[asyncio.StreamWriter, str], Awaitable[None] | None]
"""(writer, address of another server)."""


def _lengths(length: object, body: bytes = b"{}") -> Answer:
    text = hostile.head(200, more=f"Content-Length: {length}\r\n") + body
    return lambda writer, _: writer.write(text)


def _redirect(status: int) -> Answer:
    return lambda writer, there: writer.write(hostile.whole(status, b"", more=f"Location: {there}/stolen\r\n"))


LINE = b"HTTP/1.1 200 Fine\r\n"
CHUNKED = hostile.head(200, more="Transfer-Encoding: chunked\r\n")
TWICE = hostile.head(200, more="Content-Encoding: gzip, gzip\r\n")
ANSWERS: dict[str, Answer] = {
    "a body without end": lambda writer, _: hostile.endless(writer, 200),
    "a refusal without end": lambda writer, _: hostile.endless(writer, 500),
    "chunks without end": lambda writer, _: hostile.again(writer, CHUNKED, b"10000\r\n" + b"x" * 2**16 + b"\r\n"),
    "a chunk of any size": lambda writer, _: hostile.again(writer, CHUNKED + b"f" * 15 + b"\r\n", b"x" * 2**16),
    "a chunk's size without end": lambda writer, _: hostile.again(writer, CHUNKED, b"f" * 2**16),
    "trailers without end": lambda writer, _: hostile.again(writer, CHUNKED + b"0\r\n", b"A: b\r\n" * 2**12),
    "packed twice": lambda writer, _: writer.write(TWICE + hostile.packed_twice(2**28)),
    "packed": lambda writer, _: hostile.bomb(writer, 200, encoding="gzip"),
    "a packed refusal": lambda writer, _: hostile.bomb(writer, 503, encoding="deflate"),
    "headers without end": lambda writer, _: hostile.endless_headers(writer),
    "a header without end": lambda writer, _: hostile.again(writer, LINE + b"A: ", b"b" * 2**16),
    "a status without end": lambda writer, _: hostile.again(writer, b"HTTP/1.1 200 ", b"b" * 2**16),
    "informed without end": lambda writer, _: hostile.again(writer, b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 2**10),
    "dripping informations": lambda writer, _: hostile.drip(writer, 0, begin=b"", part=b"HTTP/1.1 103 So\r\n\r\n"),
    "a dripping body": lambda writer, _: hostile.drip(writer, 200),
    "a dripping refusal": lambda writer, _: hostile.drip(writer, 404),
    "dripping headers": lambda writer, _: hostile.drip(writer, 200, begin=LINE, part=b"A: b\r\n"),
    "a dripping header": lambda writer, _: hostile.drip(writer, 200, begin=LINE + b"A: ", part=b"b"),
    "dripping chunks": lambda writer, _: hostile.drip(writer, 200, begin=CHUNKED, part=b"1\r\n \r\n"),
    "a length that never comes": _lengths(FAR),
    "a length a little too large": _lengths(3),
    "a length below zero": _lengths(-1, b""),
    "two lengths": _lengths("1\r\nContent-Length: 2"),
    "a refusal of several lines": lambda writer, _: writer.write(hostile.whole(400, b"one\nanother\r\n")),
    "lines that are no status": lambda writer, _: writer.write(b"no\x0bstatus\r\nat all\r\n\r\n"),
    "silence": lambda writer, _: asyncio.Event().wait(),
    "nothing": lambda writer, _: None,
    "no HTTP": lambda writer, _: writer.write(b"\x16\x03\x01" * 100),
    "a wait of all years": lambda writer, _: writer.write(
        hostile.whole(503, b"", more=f"Retry-After: Fri, 01 Jan {FAR} 00:00:00 GMT\r\n")
    ),
    **{f"redirected by {status}": _redirect(status) for status in (301, 302, 303, 307, 308)},
}


@dataclass(kw_only=True)
class Case:
    """One exchange, and what its client reported."""

    server: str
    """https://host:port, or http://."""
    authority: Authority
    timeout_s: float = TIMEOUT_S
    open: AsyncExitStack = field(default_factory=AsyncExitStack)

    @property
    def address(self) -> str:
        """host:port."""
        return self.server.partition("//")[2]

    def tls(self) -> ssl.SSLContext:
        """Trust in the server."""
        context = ssl.create_default_context(cadata=self.authority.pem.decode())
        context.check_hostname = False
        return context


class KopfError(Exception):
    """What kopf would log."""


Ask = Callable[[Case], Awaitable[object]]


async def _reward(case: Case, **options: object) -> None:
    http = {"url": f"{case.server}/score", "tokenVariable": "REWARD_TOKEN_JUDGE", "retries": 1, **options}
    reward = {"name": "judge", "timeoutSeconds": case.timeout_s, "http": http}
    (part,) = make_parts(make_task(rewards=[reward]).rewards, verify=lambda *_: 0.0, base_dir=Path())
    assert part.endpoint is not None
    case.open.push_async_callback(part.endpoint.close)
    item = Item(prompt="1+1=", target="", question="1+1", answer="2", metadata={}, source_index=0)
    await part.ask(part.endpoint.body("a", item))


async def _judge(case: Case) -> None:
    await _reward(case, chat={"model": "judge", "prompt": "Is {completion} right?"})


async def _weights(case: Case) -> None:
    version = pb.VersionName(attempt=1, step=1, hash=b"h" * 32)
    await pull_along(
        Route(pb.WeightsAvailable(version=version, address=case.address)), timeout_s=case.timeout_s, token=TOKEN
    )


async def _status_page(case: Case) -> None:
    await asyncio.to_thread(fetch, case.address, "/numbers", timeout_s=case.timeout_s, most_bytes=2**20)


def _access(case: Case) -> RestConfig:
    return RestConfig(server=case.server, tls=None, token=TOKEN)


async def _operator(case: Case) -> None:
    async with Client(_access(case), timeout_s=case.timeout_s) as client:
        await client.get(SERVICE, namespace="n", name="s")


async def _operator_page(case: Case) -> None:
    where = {"namespace": "n", "service": "s", "port": "signals", "page": "numbers"}
    async with Client(_access(case)) as client:
        await client.read_page(**where, timeout_s=case.timeout_s)


async def _command(case: Case) -> None:
    connection = ApiConnection(_access(case), agent="test")
    case.open.push_async_callback(connection.aclose)
    await ApiClient(connection, context="here", namespace="n", timeout_s=case.timeout_s).get(RLJOB, "job")


async def _issuer(case: Case) -> None:
    config = {"idp-issuer-url": case.server, "client-id": "c", "client-secret": TOKEN, "refresh-token": TOKEN}
    await Oidc(Provider.model_validate(config), tls=case.tls(), timeout_s=case.timeout_s).token(tls=None)


async def _kopf(case: Case) -> None:
    """As those use a session who know nothing of its bounds."""
    limit, headers = aiohttp.ClientTimeout(total=case.timeout_s), {"Authorization": f"Bearer {TOKEN}"}
    async with session(tls=None, agent="test") as made:
        try:
            async with made.get(case.server, timeout=limit, headers=headers) as answer:
                if answer.status != HTTPStatus.OK:
                    raise KopfError(f"status {answer.status}")
                await answer.json()
        except (aiohttp.ClientError, TimeoutError, OversizeError, ValueError) as error:
            raise KopfError(one_line(error)) from error


CLIENTS: dict[str, tuple[Ask, tuple[type[Exception], ...], bool]] = {
    "reward": (_reward, (EndpointError, TimeoutError), False),
    "judge": (_judge, (EndpointError, TimeoutError), False),
    "weights": (_weights, (WeightsError,), True),
    "status page": (_status_page, (FetchError,), True),
    "operator": (_operator, (KubeError,), False),
    "operator's page": (_operator_page, (KubeError,), False),
    "command": (_command, (UserError,), False),
    "OIDC issuer": (_issuer, (UserError,), True),
    "kopf": (_kopf, (KopfError,), False),
}
"""Client -> how it asks, its errors, whether its text names the address (the others name an object, or their callers name the reward)."""


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority("all")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, authority: Authority, tmp_path: Path) -> None:
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(authority.pem)
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))  # to read all authorities of the world takes each client a while
    monkeypatch.setenv("REWARD_TOKEN_JUDGE", TOKEN)


def _server_tls(authority: Authority, folder: Path) -> ssl.SSLContext:
    leaf, pair = authority.leaf("all", hosts=("localhost",)), folder / "pair.pem"
    pair.write_bytes(leaf.chain + leaf.key_pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair)
    return context


@asynccontextmanager
async def _elsewhere(tls: ssl.SSLContext | None) -> AsyncIterator[tuple[str, list[str]]]:
    """Another server, and what was asked there."""
    asked: list[str] = []

    def note(line: str, writer: asyncio.StreamWriter) -> None:
        asked.append(line)
        writer.write(hostile.whole(200, b"{}"))

    async with hostile.serve(note, tls=tls) as address:
        yield address, asked


@contextmanager
def _growth_mib() -> Iterator[list[float]]:
    """How far the peak of memory grows within."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before, grown = _peak_mib(), []
    yield grown
    grown.append(_peak_mib() - before)


def _peak_mib() -> float:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) / 1024


async def _exchange(name: str, ask: Ask, case: Case, *, errors: tuple[type[Exception], ...], is_named: bool) -> None:
    begun_s = time.monotonic()
    async with case.open:
        with pytest.raises(errors) as caught:
            await ask(case)
    text = str(caught.value)
    assert time.monotonic() - begun_s < LATE_S, name
    assert TOKEN not in text, name
    assert "\n" not in text, name
    assert len(text) < 1500, name
    assert not is_named or case.address in text, f"{name}: {text}"


def _give(answer: Answer, elsewhere: str, _: str, writer: asyncio.StreamWriter) -> object:
    return answer(writer, elsewhere)


@pytest.mark.parametrize("client", CLIENTS)
async def test_it_ends_in_time_within_its_memory_and_goes_nowhere_else(
    client: str, authority: Authority, tmp_path: Path
) -> None:
    ask, errors, is_named = CLIENTS[client]
    tls = _server_tls(authority, tmp_path) if client == "OIDC issuer" else None
    hostile.packed_twice(2**28)
    async with AsyncExitStack() as servers:
        elsewhere, asked = await servers.enter_async_context(_elsewhere(tls))
        cases: dict[str, Case] = {}
        for name, answer in ANSWERS.items():  # all before the first exchange: its failure would cancel a start half-way
            give = partial(_give, answer, elsewhere)
            server = await servers.enter_async_context(hostile.serve(give, tls=tls))
            cases[name] = Case(server=server, authority=authority)
        with _growth_mib() as grown:
            async with asyncio.TaskGroup() as exchanges:
                for name, case in cases.items():
                    exchange = _exchange(name, ask, case, errors=errors, is_named=is_named)
                    exchanges.create_task(exchange, name=name)
    assert asked == []
    assert grown[0] < MOST_MIB


HOOK = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("hooks", sys.argv[1])
hooks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hooks)
hooks.REQUEST_S = float(sys.argv[2])
hooks.Api().call("GET", "/apis")
"""


@pytest.mark.parametrize(
    "name",
    ["redirected by 302", "a body without end", "a dripping refusal", "a dripping header", "informed without end"],
)
async def test_the_charts_hooks_end_in_time_and_take_their_token_nowhere(
    name: str, authority: Authority, tmp_path: Path
) -> None:
    """They run as a program, where nothing of ours is installed."""
    tls = _server_tls(authority, tmp_path)
    (tmp_path / "ca.crt").write_bytes(authority.pem)
    (tmp_path / "token").write_text(TOKEN)
    async with (
        _elsewhere(tls) as (elsewhere, asked),
        hostile.serve(lambda _, writer: ANSWERS[name](writer, elsewhere), tls=tls) as server,
    ):
        port = server.rpartition(":")[2]
        where = {"KUBERNETES_SERVICE_HOST": "localhost", "KUBERNETES_SERVICE_PORT": port}
        program = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", HOOK, str(ROOT / "helm/streamrl/files/hooks.py"), str(TIMEOUT_S)),
            env={**os.environ, **where, "SERVICE_ACCOUNT_DIR": str(tmp_path)},
            stderr=asyncio.subprocess.PIPE,
        )
        _, said = await asyncio.wait_for(program.communicate(), 60)
    assert program.returncode == 1
    assert said.decode().startswith("GET /apis: ")
    assert said.decode().count("\n") == 1
    assert asked == []
