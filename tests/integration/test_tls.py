"""Whom the servers let in: real processes and real certificates, good ones and every kind of bad one."""

import asyncio
import http.client
import re
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from streamrl import keys
from streamrl.errors import EXIT_USER_ERROR
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.stream.auth import WEIGHTS_PATH, await_admission, call_metadata
from streamrl_workers.stream.channel import SCHEDULER, ConnectTimeoutError, client, connect
from streamrl_workers.stream.messages import write
from streamrl_workers.stream.tls import Tls
from streamrl_workers.weights.http_client import HttpSource
from streamrl_workers.weights.http_server import content_path, versions_path
from streamrl_workers.weights.source import SourceBrokenError
from support.certificates import Authority, mount
from support.jobs import simulated_job, write_prompts
from support.pods import HOST, Pods
from support.runs import wait_for

ANSWER_S = 120.0
SILENCE_S = 90.0
REFUSED_S = 2.0
"""A handshake that fails fails at once, and is tried again; there is nothing to wait for longer."""


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    """A scheduler and a trainer that serve; nothing of it ends before the tests do."""
    job = simulated_job(steps=100_000)
    job["spec"]["trainer"]["engine"]["simulated"] = {"secondsPerStep": 1.0}
    made = Pods.make(job, base=tmp_path_factory.mktemp("tls") / "pods")
    write_prompts(made.run_dir / "prompts.jsonl")
    made.start("scheduler")
    made.start("trainer")
    wait_for(lambda: made.numbers().get("attempt"), what=f"the trainer's attempt; {made.logs()}")
    yield made
    alive = not made.ended("scheduler") and not made.ended("trainer")
    made.close()
    assert alive, made.logs()


async def channel_of(pods: Pods, service: str, *, files: Path | None, timeout_s: float = ANSWER_S) -> grpc.aio.Channel:
    """A channel with the certificates in `files`; None: without any."""
    tls = None if files is None else Tls(files)
    return await connect(f"{HOST}:{pods.ports[service]}", timeout_s=timeout_s, who=f"the {service} port", tls=tls)


async def generate(channel: grpc.aio.Channel) -> Any:
    call = client(channel, SCHEDULER).Generate(metadata=call_metadata("any"))
    return await _converse(
        call, pb.GeneratorEvent(hello=pb.GeneratorHello(generator_id="g", instance="i", pool="sim", slots=1))
    )


async def train(channel: grpc.aio.Channel) -> Any:
    call = client(channel, SCHEDULER).Train(metadata=call_metadata("any"))
    return await _converse(call, pb.TrainerEvent(heartbeat=pb.TrainerHeartbeat()))


async def agents(channel: grpc.aio.Channel) -> Any:
    call = client(channel, SCHEDULER).Agents(metadata=call_metadata("any"))
    return await _converse(call, pb.AgentsEvent(hello=pb.AgentsHello(host_id="h", instance="i")))


async def get_model(channel: grpc.aio.Channel) -> Any:
    return [piece async for piece in client(channel, SCHEDULER).GetModel(pb.ModelRequest(), timeout=ANSWER_S)]


def get_manifest(port: int, context: ssl.SSLContext | None) -> tuple[str, str]:
    return _asked(versions_path(pb.VersionName(attempt=9, step=9, hash=b"9")), port=port, context=context)


def get_content(port: int, context: ssl.SSLContext | None) -> tuple[str, str]:
    return _asked(content_path(bytes(32)), port=port, context=context)


STATUSES = {401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND"}


def _asked(path: str, *, port: int, context: ssl.SSLContext | None) -> tuple[str, str]:
    """gRPC's name of the status, and its text; None: without TLS."""
    if context is None:
        connection = http.client.HTTPConnection(HOST, port, timeout=ANSWER_S)
    else:
        connection = http.client.HTTPSConnection(HOST, port, timeout=ANSWER_S, context=context)
    try:
        connection.request("GET", path)
        with connection.getresponse() as response:
            return STATUSES[response.status], response.read().decode()
    except (OSError, http.client.HTTPException) as error:
        return "UNAVAILABLE", str(error)
    finally:
        connection.close()


def context_of(trusted: bytes, files: Path | None) -> ssl.SSLContext:
    """Of one who does not look at his own files; None: he has no certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cadata=trusted.decode())
    if files is not None:
        context.load_cert_chain(files / "tls.crt", files / "tls.key")
    return context


async def _converse(call: Any, event: Any) -> Any:
    async with asyncio.timeout(ANSWER_S):
        await await_admission(call)
        await write(call, event)
        answer = await call.read()
    if answer is grpc.aio.EOF:
        raise grpc.aio.AioRpcError(await call.code(), grpc.aio.Metadata(), grpc.aio.Metadata(), await call.details())
    call.cancel()
    return answer


async def outcome(call: Callable[[grpc.aio.Channel], Any], channel: grpc.aio.Channel) -> tuple[str, str]:
    """Status and its text of a call."""
    try:
        await call(channel)
    except grpc.aio.AioRpcError as error:
        return error.code().name, str(error.details())
    return "OK", ""


CALLS = {
    generate: ("grpc", "generator", "OK"),
    agents: ("grpc", "agents", "FAILED_PRECONDITION"),  # let in: the job has no pool of agents
    train: ("grpc", "trainer", "INVALID_ARGUMENT"),  # let in: its first message was no hello
    get_model: ("grpc", "generator and agents", "UNAVAILABLE"),  # let in: a simulated job has no model
    get_manifest: ("weights", "generator and trainer", "NOT_FOUND"),
    get_content: ("weights", "generator and trainer", "NOT_FOUND"),
}
"""Call -> its port, the roles that may make it, and what they get here."""


async def answered(pods: Pods, call: Callable[..., Any], *, files: Path) -> tuple[str, str]:
    """What a call gets that is made with these files, whosever they are."""
    service, tls = CALLS[call][0], Tls(files)
    if service == "weights":
        return await asyncio.to_thread(call, pods.ports[service], tls.ssl_context(server=False))
    options = (("grpc.ssl_target_name_override", "simulated-scheduler"),)
    address = f"{HOST}:{pods.ports[service]}"
    async with grpc.aio.secure_channel(address, tls.channel_credentials(), options=options) as channel:
        return await outcome(call, channel)


@pytest.mark.parametrize("role", ["scheduler", "trainer", "generator", "agents"])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
async def test_each_call_is_for_one_role(pods: Pods, tmp_path: Path, call: Any, role: str) -> None:
    _, allowed, answer = CALLS[call]
    files = mount(tmp_path / "leaf", trusted=(pods.ca,), leaf=pods.leaf(role))
    code, text = await answered(pods, call, files=files)
    if role in allowed.split(" and "):
        assert code == answer, text
    else:
        assert code == "PERMISSION_DENIED"
        assert text.startswith(f"streamrl://team/simulated/{role}: ")
        assert text.endswith(f" is for {allowed}")


@pytest.mark.parametrize("changes", [{"job": "another"}, {"namespace": "another"}], ids=["job", "namespace"])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
async def test_another_jobs_leaf_of_the_same_authority_is_refused(
    pods: Pods, tmp_path: Path, call: Any, changes: dict[str, str]
) -> None:
    role = CALLS[call][1].split(" and ")[0]
    files = mount(tmp_path / "leaf", trusted=(pods.ca,), leaf=pods.leaf(role, **changes))
    code, text = await answered(pods, call, files=files)
    assert (code, text.endswith("this is job team/simulated")) == ("PERMISSION_DENIED", True), text


@pytest.mark.parametrize("uris", [("https://example.org/",), ("streamrl://team/simulated/generator",) * 2])
async def test_a_leaf_that_names_no_one_role_is_unknown(pods: Pods, tmp_path: Path, uris: tuple[str, ...]) -> None:
    good = mount(tmp_path / "good", trusted=(pods.ca,), leaf=pods.leaf("generator"))
    leaf = pods.leaf("generator", uris=uris)
    credentials = grpc.ssl_channel_credentials(Tls(good).material().ca, leaf.key_pem, leaf.chain)
    options = (("grpc.ssl_target_name_override", "simulated-scheduler"),)
    async with grpc.aio.secure_channel(f"{HOST}:{pods.ports['grpc']}", credentials, options=options) as channel:
        answers = [await outcome(generate, channel)]
    files = mount(tmp_path / "leaf", trusted=(pods.ca,), leaf=leaf)
    answers.append(await asyncio.to_thread(get_manifest, pods.ports["weights"], context_of(pods.ca.pem, files)))
    for code, text in answers:
        assert code == "UNAUTHENTICATED"
        assert "must name exactly one role" in text


@pytest.fixture(params=["none", "no certificate", "foreign authority", "expired", "its own authority"])
def stranger(request: pytest.FixtureRequest, pods: Pods, tmp_path: Path) -> tuple[Any, ssl.SSLContext | None]:
    """What no handshake takes, for gRPC and for HTTP; the last one brings an authority that the server does not know."""
    foreign = Authority("foreign")
    trusted = pods.ca.pem
    leaf = {
        "foreign authority": lambda: foreign.leaf("generator", job=pods.name),
        "expired": lambda: pods.leaf("generator", expired=True),
        "its own authority": lambda: foreign.leaf("generator", job=pods.name),
    }.get(request.param)
    if request.param == "none":
        return None, None
    if leaf is None:
        return grpc.ssl_channel_credentials(trusted), context_of(trusted, None)
    made = leaf()
    chain = made.chain + (foreign.pem if request.param == "its own authority" else b"")
    files = mount(tmp_path / "stranger", trusted=(), leaf=made)
    (files / "tls.crt").write_bytes(chain)
    return grpc.ssl_channel_credentials(trusted, made.key_pem, chain), context_of(trusted, files)


@pytest.mark.parametrize(("call", "service"), [(generate, "grpc"), (get_manifest, "weights")])
async def test_a_stranger_does_not_get_in(pods: Pods, stranger: Any, call: Any, service: str) -> None:
    credentials, context = stranger
    if service == "weights":
        assert (await asyncio.to_thread(call, pods.ports[service], context))[0] == "UNAVAILABLE"
        return
    address = f"{HOST}:{pods.ports[service]}"
    options = (("grpc.ssl_target_name_override", "simulated-scheduler"), ("grpc.enable_retries", 0))
    channel = (
        grpc.aio.insecure_channel(address)
        if credentials is None
        else grpc.aio.secure_channel(address, credentials, options=options)
    )
    async with channel:
        code, _ = await outcome(call, channel)
    assert code == "UNAVAILABLE"


async def test_a_server_of_another_job_or_role_is_not_taken_for_ours(pods: Pods, tmp_path: Path) -> None:
    """The same port, dialled by someone who expects another job there."""
    files = mount(tmp_path / "other", trusted=(pods.ca,), leaf=pods.leaf("generator", job="another"))
    with pytest.raises(ConnectTimeoutError, match=r"did not answer .* with TLS as streamrl://team/another/generator"):
        await channel_of(pods, "grpc", files=files, timeout_s=REFUSED_S)
    ours = mount(tmp_path / "ours", trusted=(Authority("foreign"),), leaf=pods.leaf("generator"))
    with pytest.raises(ConnectTimeoutError):
        await channel_of(pods, "grpc", files=ours, timeout_s=REFUSED_S)


@pytest.mark.parametrize(
    ("authority", "job", "role", "reason"),
    [
        (
            "ours",
            "another",
            "trainer",
            "its certificate is of streamrl://team/simulated/trainer, not of the trainer of team/another",
        ),
        ("ours", "simulated", "generator", "not of the generator of team/simulated"),
        ("foreign", "simulated", "trainer", "certificate verify failed"),
    ],
)
async def test_a_server_of_weights_must_be_who_is_expected(
    pods: Pods, tmp_path: Path, authority: str, job: str, role: Any, reason: str
) -> None:
    trusted = pods.ca if authority == "ours" else Authority("foreign")
    files = mount(tmp_path / "leaf", trusted=(trusted,), leaf=pods.leaf("generator", job=job))
    with pytest.raises(SourceBrokenError, match=reason):
        await HttpSource.connect(f"{HOST}:{pods.ports['weights']}", tls=Tls(files), token="", role=role)


async def test_paths_that_are_none_and_bodies_are_refused(pods: Pods, tmp_path: Path) -> None:
    files = mount(tmp_path / "leaf", trusted=(pods.ca,), leaf=pods.leaf("generator"))
    address = HOST, pods.ports["weights"]
    for request, status in {
        f"GET {WEIGHTS_PATH}/v2/blake3/versions/../.. HTTP/1.1": 400,
        f"GET {WEIGHTS_PATH}/v2/blake3/content/{'0' * 63} HTTP/1.1": 400,
        "GET / HTTP/1.1\r\nContent-Length: 1": 400,
        "GET / HTTP/1.0": 400,
        "PUT / HTTP/1.1": 501,
        f"GET /{'x' * 9_000} HTTP/1.1": 414,
        "GET / HTTP/1.1\r\n" + "\r\n".join(f"X-{n}: 1" for n in range(200)): 431,
    }.items():
        with Tls(files).ssl_context(server=False).wrap_socket(socket.create_connection(address, ANSWER_S)) as sock:
            sock.sendall(request.encode() + b"\r\n\r\n")
            assert sock.recv(100).split()[:2] == [b"HTTP/1.1", str(status).encode()], request


async def test_refusals_are_told_once_for_each_peer(pods: Pods, tmp_path: Path) -> None:
    files = mount(
        tmp_path / "leaf", trusted=(pods.ca,), leaf=pods.leaf("trainer", uris=("streamrl://team/simulated/spy",))
    )
    for _ in range(3):
        channel = await channel_of(pods, "grpc", files=files)
        assert (await outcome(generate, channel))[0] == "PERMISSION_DENIED"
        await channel.close()
    assert len(re.findall(r"refused streamrl://team/simulated/spy at ipv4:127\.0\.0\.1: ", pods.text("scheduler"))) == 1


def test_a_generator_with_another_roles_leaf_ends_as_the_users_error(pods: Pods) -> None:
    mount(pods.base / "tls" / "generator", trusted=(pods.ca,), leaf=pods.leaf("trainer"))
    try:
        pods.start_generator(7)
        assert pods.wait("simulated-sim-7") == EXIT_USER_ERROR, pods.text("simulated-sim-7")
        line = pods.last_line("simulated-sim-7")
        assert line.startswith(f"{keys.ENV_TLS_DIR}: the scheduler at {HOST}:{pods.ports['grpc']} does not take its")
    finally:
        mount(pods.base / "tls" / "generator", trusted=(pods.ca,), leaf=pods.leaf("generator"))


@pytest.mark.parametrize("container", ["scheduler", "trainer", "generator"])
def test_bad_files_are_one_line(tmp_path: Path, container: str) -> None:
    pods = Pods.make(simulated_job(), base=tmp_path / "pods")
    other = pods.leaf(container)
    (pods.base / "tls" / container / "tls.key").unlink()
    (pods.base / "tls" / container / "tls.key").write_bytes(other.key_pem)
    try:
        name = "simulated-sim-0" if container == "generator" else container
        pods.start(container, pod=name if container == "generator" else "")
        assert pods.wait(name) == EXIT_USER_ERROR, pods.text(name)
        assert "tls.key is not the key of tls.crt" in pods.last_line(name)
    finally:
        pods.close()


@pytest.mark.parametrize("service", ["grpc", "weights"])
def test_a_connection_that_begins_no_handshake_is_closed(pods: Pods, service: str) -> None:
    """gRPC's own limit is two minutes: the deadline is far from it, and from ours."""
    with socket.create_connection((HOST, pods.ports[service])) as silent:
        silent.settimeout(SILENCE_S)
        while silent.recv(4096):
            pass
