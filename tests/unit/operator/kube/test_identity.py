"""Who we are, and by which way an API server is reached: impersonation, proxies, names of servers, OIDC. Real TLS, a real issuer."""

import base64
import contextlib
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from streamrl.errors import UserError
from streamrl_operator.kube import credentials, kubeconfig
from streamrl_operator.kube.connections import ApiConnection
from streamrl_operator.kube.rest_config import RestConfig
from streamrl_pages.http_client import session
from support.certificates import Authority
from support.connect_proxy import ConnectProxy
from support.oidc_issuer import OidcIssuer

LIMIT = aiohttp.ClientTimeout(total=60.0)
DEEP = base64.urlsafe_b64encode(b"[" * 100_000).decode()
NAME = "api.inside.example"
"""That the server's certificate has; its host has none there."""


def access(user: dict[str, Any], **cluster: Any) -> RestConfig:
    """As a kubeconfig says."""
    known = {"server": "https://127.0.0.1:1", **cluster}
    config = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": known}],
        "users": [{"name": "u", "user": user}],
    }
    return kubeconfig.from_kubeconfig(json.dumps(config))


async def headers(user: dict[str, Any]) -> list[tuple[str, str]]:
    """That say who we are."""
    return sorted((await access(user).headers()).items())


async def test_in_whose_name_we_act() -> None:
    extra = {"as-uid": "7", "as-user-extra": {"example.com/scopes": ["a", "b"]}}
    assert await headers({"token": "t", "as": "ada", "as-groups": ["x", "y"], **extra}) == [
        ("Authorization", "Bearer t"),
        ("Impersonate-Extra-example.com%2Fscopes", "a"),
        ("Impersonate-Extra-example.com%2Fscopes", "b"),
        ("Impersonate-Group", "x"),
        ("Impersonate-Group", "y"),
        ("Impersonate-Uid", "7"),
        ("Impersonate-User", "ada"),
    ]


@pytest.mark.parametrize(
    ("user", "cluster", "words"),
    [
        ({"as-groups": ["x"]}, {}, "need `as`"),
        ({}, {"proxy-url": "socks5://me:secret@p"}, "proxy-url must begin with http:// or https://, not socks5"),
        ({}, {"server": "ftp://api"}, "server must begin with http:// or https://"),
        ({}, {"server": "api:secret"}, "server must begin with http:// or https://"),
        ({"auth-provider": {"name": "gcp"}}, {}, "auth-provider gcp is no more: use a credential plug-in"),
        ({"auth-provider": {"name": "oidc", "config": {"client-id": "c"}}}, {}, "idp-issuer-url"),
        ({"auth-provider": {"name": "oidc", "config": {"idp-issuer-url": "http://i", "client-id": "c"}}}, {}, "https"),
    ],
)
def test_what_cannot_be_honoured_is_one_line(user: dict[str, Any], cluster: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match="must be a kubeconfig") as refused:
        access(user, **cluster)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "secret" not in str(refused.value)


NO_SECRET = {"apiVersion": "v1", "command": "c", "env": [{"name": "PASSWORD", "value": ["secret"]}]}


@pytest.mark.parametrize(
    ("user", "where"),
    [
        (
            {"auth-provider": {"name": "oidc", "config": {"client-id": "c", "client-secret": "secret"}}},
            "idp-issuer-url",
        ),
        ({"auth-provider": {"name": "oidc", "config": {"client-secret": ["secret"]}}}, "client-secret"),
        ({"exec": NO_SECRET}, "env.0.value"),
        ({"exec": {"command": "c", "args": ["--password=secret"]}}, "apiVersion"),
    ],
)
def test_a_refusal_names_the_field_and_keeps_what_stands_there(user: dict[str, Any], where: str) -> None:
    with pytest.raises(UserError, match=f"{where}: ") as refused:
        access(user)
    assert "secret" not in str(refused.value).replace(where, "")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["a: 1\n token: [secret", "token: secret\ntoken: other", "a: *secret"])
def test_a_refusal_of_yaml_names_the_line_alone(text: str) -> None:
    with pytest.raises(UserError, match=r"in line [12]") as refused:
        kubeconfig.from_kubeconfig(text)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("user", [{"token": "a\nHost: b"}, {"as": "a\r\nb"}, {"as": "a", "as-groups": ["b\0"]}])
async def test_nothing_in_a_kubeconfig_becomes_a_header_of_its_own(user: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="must each be one line of text"):
        await headers(user)


class Tells(BaseHTTPRequestHandler):
    """Answers with what it was sent."""

    def do_GET(self) -> None:
        body = json.dumps({"path": self.path, "groups": self.headers.get_all("Impersonate-Group")}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


class Knows(Tells):
    """Answers with the number of the client's certificate and of the connection, which is kept. What is asked of /late waits for `gate`."""

    protocol_version = "HTTP/1.1"
    gate = threading.Event()

    def do_GET(self) -> None:
        certificate = cast(ssl.SSLSocket, self.connection).getpeercert()
        assert certificate
        body = json.dumps([certificate["serialNumber"], self.client_address[1]]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.path == "/late":
            self.gate.wait(60)
        self.wfile.write(body)


@contextmanager
def tls_server(
    folder: Path, answers: type[Tells] = Tells, *, clients: Authority | None = None
) -> Iterator[tuple[int, str]]:
    """Port of a server, and the authority of its certificate for `certificate-authority`; `clients` signs for those it takes."""
    authority = Authority()
    leaf = authority.leaf("api", hosts=(NAME,))
    (folder / "pair.pem").write_bytes(leaf.chain + leaf.key_pem)
    (folder / "ca.pem").write_bytes(authority.pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "pair.pem")
    if clients is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=clients.pem.decode())
    with ThreadingHTTPServer(("127.0.0.1", 0), answers) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=server.serve_forever, args=(0.02,), name="server", daemon=True).start()
        yield server.server_port, str(folder / "ca.pem")
        server.shutdown()


async def get(connection: ApiConnection, path: str) -> Any:
    """What is answered."""
    async with connection.request("GET", path, timeout=LIMIT, headers={"Accept": "application/json"}) as answer:
        return json.loads(await answer.read())


async def test_through_a_proxy_to_a_server_of_another_name(tmp_path: Path) -> None:
    user = {"as": "ada", "as-groups": ["x", "y"]}
    with tls_server(tmp_path) as (port, authority):
        trusted = {"server": "https://nowhere.invalid", "certificate-authority": authority, "tls-server-name": NAME}
        with ConnectProxy(port) as proxy:
            async with aclosing(
                ApiConnection(access(user, **trusted, **{"proxy-url": proxy.url}), agent="test")
            ) as connection:
                assert await get(connection, "/a") == {"path": "/a", "groups": ["x", "y"]}
            assert proxy.tunnels == ["nowhere.invalid:443"]


async def test_the_name_of_the_server_is_looked_at(tmp_path: Path) -> None:
    with tls_server(tmp_path) as (port, authority):
        trusted = {"server": f"https://127.0.0.1:{port}", "certificate-authority": authority}
        async with aclosing(ApiConnection(access({}, **trusted), agent="test")) as connection:
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await get(connection, "/a")
        async with aclosing(
            ApiConnection(access({}, **trusted, **{"tls-server-name": NAME}), agent="test")
        ) as connection:
            assert (await get(connection, "/a"))["path"] == "/a"


async def test_a_renewed_certificate_is_shown_by_the_next_request_and_cuts_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials.Plugin, "pause_s", 0.0)
    clients = Authority("clients")

    def renewed() -> int:
        """Serial number of the certificate that the plug-in gives from now on."""
        leaf = clients.leaf("trainer")
        pair = {"clientCertificateData": leaf.chain.decode(), "clientKeyData": leaf.key_pem.decode()}
        (tmp_path / "printed").write_text(json.dumps({"status": pair}))
        return leaf.certificate.serial_number

    plugin = {"apiVersion": "v1", "command": "cat", "args": [str(tmp_path / "printed")]}
    with tls_server(tmp_path, Knows, clients=clients) as (port, authority):
        trusted = {"certificate-authority": authority, "tls-server-name": NAME}
        found = access({"exec": plugin}, server=f"https://127.0.0.1:{port}", **trusted)
        async with aclosing(ApiConnection(found, agent="test")) as connection:

            async def after(serial_number: int) -> int:
                """That of the next request."""
                found.forget()
                shown, _ = await get(connection, "/a")
                assert int(shown, 16) == serial_number
                return serial_number

            first = await after(renewed())
            told = [await get(connection, "/a")]
            found.forget()  # and it gives the same again
            told += [await get(connection, "/a")]
            assert told[0] == told[1]
            async with connection.request("GET", "/late", timeout=LIMIT, headers={}) as begun:
                second = await after(renewed())
                Knows.gate.set()
                assert json.loads(await begun.read()) == told[0]
            assert len({first, second, await after(renewed()), await after(renewed())}) == 4


@pytest.mark.parametrize("spelled", ["HTTPS://{}", "Https://{}/", " https://{}", "\thttps://{} "])
async def test_a_certificate_is_looked_at_however_the_server_is_spelled(tmp_path: Path, spelled: str) -> None:
    with tls_server(tmp_path) as (port, authority):
        server = spelled.format(f"127.0.0.1:{port}")
        async with aclosing(ApiConnection(access({"token": "t"}, server=server), agent="test")) as connection:
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await get(connection, "/a")
        trusted = {"server": server, "certificate-authority": authority, "tls-server-name": NAME}
        async with aclosing(ApiConnection(access({}, **trusted), agent="test")) as connection:
            assert (await get(connection, "/a"))["path"] == "/a"


async def test_https_without_a_word_on_trust_is_looked_at(tmp_path: Path) -> None:
    with tls_server(tmp_path) as (port, _):
        found = RestConfig(server=f"https://127.0.0.1:{port}", tls=None)
        async with aclosing(ApiConnection(found, agent="test")) as connection:
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await get(connection, "/a")


async def test_elsewhere_nobody_is_told_who_we_are_and_no_proxy_is_used(tmp_path: Path) -> None:
    async def tell(request: web.Request) -> web.Response:
        return web.json_response(
            sorted(name for name in request.headers if name in ("Authorization", "Impersonate-User"))
        )

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", tell)
    async with TestServer(application) as pod:
        found = access({"token": "t", "as": "ada"}, **{"proxy-url": "http://127.0.0.1:1"})
        async with aclosing(ApiConnection(found, agent="test")) as connection:
            assert await get(connection, str(pod.make_url("/status"))) == []


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_socket_follows_no_redirect(status: int) -> None:
    told = []

    async def astray(request: web.Request) -> web.Response:
        told.append((request.path, request.headers.get("Authorization")))
        return web.Response(status=status, headers={"Location": "/elsewhere"})

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", astray)
    async with TestServer(application) as server:
        found = access({"token": "t"}, server=str(server.make_url("/")))
        async with aclosing(ApiConnection(found, agent="test")) as connection:
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await connection.websocket("/exec")
    assert refused.value.status == status
    assert told == [("/exec", "Bearer t")]


@pytest.fixture
def issuer() -> Iterator[OidcIssuer]:
    with OidcIssuer() as served:
        yield served


async def test_an_id_token_is_used_while_it_lasts(issuer: OidcIssuer) -> None:
    token = issuer.id_token("ada")
    assert await headers(issuer.provider(**{"id-token": token})) == [("Authorization", f"Bearer {token}")]
    assert issuer.asked == []


@pytest.mark.parametrize("first", ["ended", "none", "nonsense"])
async def test_the_issuer_is_asked_for_the_next_one_with_the_newest_refresh_token(
    issuer: OidcIssuer, first: str
) -> None:
    tokens = {"ended": issuer.id_token("ada", life_s=5), "none": "", "nonsense": f"a.{DEEP}.c"}
    found = access(issuer.provider(**{"id-token": tokens[first], "refresh-token": issuer.refresh_token}))
    issuer.life_s = 5
    for now_s in (0.0, 100.0):
        assert (await found.headers(clock=partial(float, now_s)))["Authorization"].startswith("Bearer ey")
    assert issuer.asked == ["/.well-known/openid-configuration", "/token"] * 2


@pytest.mark.parametrize("secret", [True, False])
async def test_an_issuer_is_not_sent_what_netrc_has(
    issuer: OidcIssuer, secret: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "netrc").write_text("default login me password hidden")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    config = {"refresh-token": issuer.refresh_token} | ({} if secret else {"client-secret": ""})
    with contextlib.nullcontext() if secret else pytest.raises(UserError, match="401"):
        await headers(issuer.provider(**config))
    assert issuer.told == ["", issuer.basic if secret else ""]


async def test_an_issuer_is_reached_by_the_proxy_of_the_environment(
    issuer: OidcIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = issuer.provider(**{"refresh-token": issuer.refresh_token})
    address = issuer.url.removeprefix("https://")
    with ConnectProxy(int(address.rpartition(":")[2])) as proxy:
        monkeypatch.setenv("https_proxy", proxy.url)
        await headers(user)
        assert proxy.tunnels == [address] * 2
        monkeypatch.setenv("no_proxy", "localhost")
        await headers(issuer.provider(**{"refresh-token": issuer.refresh_token}))
        assert len(proxy.tunnels) == 2


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((400, b'{"error": "invalid_grant"}'), "400, message="),
        ((302, b""), "its answer cannot be used"),
        ((200, b"nonsense"), "its answer cannot be used"),
        ((200, b'{"id_token": 3}'), "its answer cannot be used"),
        ((200, b" " * (2**24 + 1)), "its answer cannot be used"),
    ],
)
async def test_an_issuer_that_gives_no_token_is_one_line(issuer: OidcIssuer, answer: Any, words: str) -> None:
    issuer.answer = answer
    with pytest.raises(UserError) as refused:
        await headers(issuer.provider(**{"refresh-token": issuer.refresh_token}))
    assert words in str(refused.value)
    assert str(refused.value).startswith(f"KUBECONFIG: the OIDC issuer {issuer.url} gave no ID token (")
    assert issuer.refresh_token not in str(refused.value)


async def test_an_issuer_with_a_certificate_of_somebody_else_is_told_nothing(issuer: OidcIssuer) -> None:
    user = issuer.provider(**{"refresh-token": issuer.refresh_token})
    del user["auth-provider"]["config"]["idp-certificate-authority-data"]
    with pytest.raises(UserError, match="ClientConnectorCertificateError"):
        await headers(user)
    assert issuer.asked == []


async def test_without_a_refresh_token_one_logs_in_again(issuer: OidcIssuer) -> None:
    await headers(issuer.provider(**{"id-token": issuer.id_token("ada", life_s=30)}))
    with pytest.raises(UserError, match=r"there is no refresh-token.*log in there again"):
        await headers(issuer.provider(**{"id-token": issuer.id_token("ada", life_s=-5)}))


async def test_a_session_of_others_goes_the_same_way(tmp_path: Path) -> None:
    """kopf makes its requests itself: the proxy is the session's, the name of the server is put into each request."""
    with tls_server(tmp_path) as (port, authority), ConnectProxy(port) as proxy:
        found = access({}, **{"certificate-authority": authority, "tls-server-name": NAME, "proxy-url": proxy.url})

        async def named(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> Any:
            request.server_hostname = found.tls_server_name
            return await handler(request)

        async with (
            session(named, tls=found.tls, agent="test", proxy=found.proxy) as made,
            made.get(f"{found.server}/b") as answer,
        ):
            assert json.loads(await answer.read())["path"] == "/b"
        assert proxy.tunnels == ["127.0.0.1:1"]
