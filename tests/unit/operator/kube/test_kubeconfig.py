"""How an API server is reached: kubeconfigs as kubectl takes them, service accounts, tokens that change."""

import asyncio
import base64
import json
import os
import ssl
import sys
from collections.abc import Callable
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import psutil
import pytest

from streamrl.errors import UserError
from streamrl_operator import tls_secrets
from streamrl_operator.kube import credentials, kubeconfig, rest_config
from streamrl_operator.kube.connections import ApiConnection
from streamrl_operator.kube.rest_config import RestConfig
from streamrl_operator.planning.certificates import Lives
from streamrl_operator.tls_secrets import Holder, KeyPair
from support import hostile_server

NOW = datetime.now(UTC)
CA = tls_secrets.new_ca("test", now=NOW, lives=Lives())
USER = tls_secrets.new_leaf(Holder(namespace="n", job="test", role="generator"), ca=CA, now=NOW, lives=Lives())


def config(user: str, server: str = "https://api.example:6443", cluster: str = "") -> str:
    """A kubeconfig with one context."""
    return f"""
apiVersion: v1
kind: Config
current-context: here
contexts: [{{name: here, context: {{cluster: c, user: u, namespace: lab}}}}]
clusters: [{{name: c, cluster: {{server: "{server}"{cluster}}}}}]
users: [{{name: u, user: {user}}}]
"""


def b64(pem: bytes) -> str:
    """As kubeconfigs have it."""
    return base64.b64encode(pem).decode()


def at(now_s: float) -> Callable[[], float]:
    """A clock that stands."""
    return lambda: now_s


async def test_a_token() -> None:
    found = kubeconfig.from_kubeconfig(config("{token: abc}"))
    assert (found.server, found.namespace) == ("https://api.example:6443", "lab")
    assert await found.headers() == {"Authorization": "Bearer abc"}
    assert found.tls is not None
    assert found.tls.verify_mode == ssl.CERT_REQUIRED


async def test_certificates_inline_and_from_files(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_bytes(CA.certificate)
    (tmp_path / "user.pem").write_bytes(USER.certificate)
    inline = f"{{client-certificate-data: {b64(USER.certificate)}, client-key-data: {b64(USER.key)}}}"
    authority = f", certificate-authority-data: {b64(CA.certificate)}"
    files = f"{{client-certificate: user.pem, client-key-data: {b64(USER.key)}}}"
    for user, cluster in ((inline, authority), (files, ", certificate-authority: ca.pem")):
        found = kubeconfig.from_kubeconfig(config(user, cluster=cluster), base=tmp_path)
        assert await found.headers() == {}
        assert found.tls is not None
        assert len(found.tls.get_ca_certs()) == 1


async def test_a_token_file_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("one\n")
    found = kubeconfig.from_kubeconfig(config("{tokenFile: token}"), base=tmp_path)
    assert await found.headers(clock=at(0.0)) == {"Authorization": "Bearer one"}
    (tmp_path / "token").write_text("two\n")
    assert await found.headers(clock=at(30.0)) == {"Authorization": "Bearer one"}
    assert await found.headers(clock=at(61.0)) == {"Authorization": "Bearer two"}
    (tmp_path / "token").write_text("three\n")
    found.forget()
    assert await found.headers(clock=at(62.0)) == {"Authorization": "Bearer three"}


async def test_a_credential_plug_in() -> None:
    script = "import os, json; asked = json.loads(os.environ['KUBERNETES_EXEC_INFO']); "
    script += "print(json.dumps({'status': {'token': asked['kind'] + os.environ['WHO']}}))"
    plugin = f"""{{exec: {{apiVersion: client.authentication.k8s.io/v1, command: "{sys.executable}",
        args: ["-c", "{script}"], env: [{{name: WHO, value: -me}}]}}}}"""
    found = kubeconfig.from_kubeconfig(config(plugin))
    assert await found.headers() == {"Authorization": "Bearer ExecCredential-me"}


def plug_in(folder: Path, script: str) -> RestConfig:
    """Whom a shell script speaks for; `$0` is its folder."""
    args = json.dumps(["-c", script, str(folder)])
    return kubeconfig.from_kubeconfig(
        config(f"{{exec: {{apiVersion: client.authentication.k8s.io/v1, command: sh, args: {args}}}}}")
    )


GOOD = """echo '{"status": {"token": "good"}}'"""


@pytest.mark.parametrize(
    ("script", "reported"),
    [
        (f"{GOOD}; exit 3", "exit code 3"),
        ("kill -9 $$", "exit code -9"),
        ("echo nonsense", "no ExecCredential"),
        ("echo '[]'", "no ExecCredential"),
        ("""echo '{"status": []}'""", "no ExecCredential"),
        ("""echo '{"status": {"token": {"a": 1}}}'""", "no ExecCredential"),
        ("""echo '{"status": {}}'""", "neither a token nor a certificate"),
        ("yes", "printed more than"),
        ("printf '\\377'", "no ExecCredential"),
        ("", "no ExecCredential"),
    ],
)
async def test_a_credential_plug_in_that_gives_none(tmp_path: Path, script: str, reported: str) -> None:
    with pytest.raises(UserError, match=reported):
        await plug_in(tmp_path, script).headers()


@pytest.mark.parametrize(
    "entry", ["[x]", "{apiVersion: v1}", "{command: [], apiVersion: v1}", "{command: x, apiVersion: v1, env: [x]}"]
)
def test_a_credential_plug_in_that_is_none(entry: str) -> None:
    with pytest.raises(UserError, match="must be a kubeconfig"):
        kubeconfig.from_kubeconfig(config(f"{{exec: {entry}}}"))


async def test_a_credential_plug_in_that_hangs_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "_TIMEOUT_S", 0.5)
    with pytest.raises(UserError, match=r"more than 0\.5 s"):
        await plug_in(tmp_path, "sh -c 'while sleep 1; do :; done' child $0 & wait").headers()
    await until_nobody_names(tmp_path)


async def test_requests_at_once_start_a_plug_in_once_and_one_that_fails_not_at_once_again(tmp_path: Path) -> None:
    found = plug_in(tmp_path, "echo x >> $0/runs; exit 1")
    for now_s, runs in ((0.0, 1), (1.0, 1), (6.0, 2)):
        reported = await asyncio.gather(*(found.headers(clock=at(now_s)) for _ in range(20)), return_exceptions=True)
        assert all(isinstance(each, UserError) for each in reported)
        assert len((tmp_path / "runs").read_text().split()) == runs


async def asked(connection: ApiConnection, total_s: float) -> str:
    """What a request says that gets no credential."""
    with pytest.raises(UserError) as refused:
        async with connection.request("GET", "/", headers={}, timeout=aiohttp.ClientTimeout(total=total_s)):
            pass
    return str(refused.value)


async def test_requests_at_once_wait_for_a_plug_in_that_hangs_together_and_not_in_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "_TIMEOUT_S", 0.5)
    monkeypatch.setattr(rest_config, "_PAUSE_S", 0.0)
    async with aclosing(ApiConnection(plug_in(tmp_path, "echo x >> $0/runs; sleep 600"), agent="test")) as connection:
        told = await asyncio.gather(*(asked(connection, 60.0) for _ in range(4)))
    assert all("it took more than 0.5 s" in each for each in told)
    assert len((tmp_path / "runs").read_text().split()) == 1


async def test_a_request_waits_for_a_credential_within_its_deadline_and_the_next_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "_TIMEOUT_S", 5.0)
    found = plug_in(tmp_path, f"echo x >> $0/runs; until test -e $0/gate; do sleep 0.01; done; {GOOD}")
    async with aclosing(ApiConnection(found, agent="test")) as connection:
        assert "no credential within 0.2 s" in await asked(connection, 0.2)
    (tmp_path / "gate").touch()
    assert await found.headers() == {"Authorization": "Bearer good"}
    assert len((tmp_path / "runs").read_text().split()) == 1


async def test_a_credential_is_used_while_it_cannot_be_renewed(tmp_path: Path) -> None:
    found = plug_in(tmp_path, f"test -e $0/broken && exit 1; {GOOD}")
    good = {"Authorization": "Bearer good"}
    assert await found.headers(clock=at(0.0)) == good
    (tmp_path / "broken").touch()
    found.forget()
    assert await found.headers(clock=at(61.0)) == good
    (tmp_path / "broken").unlink()
    assert await found.headers(clock=at(70.0)) == good


@pytest.mark.parametrize(("command", "named"), [("./who", True), ("bin/../who", True), ("who", False)])
async def test_a_command_with_a_slash_lies_beside_the_kubeconfig(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, named: bool
) -> None:
    """As with kubectl; one without is looked for in PATH. The working directory is nobody's."""
    for folder, token in (("home", "mine"), ("work", "astray"), ("path", "path")):
        program = tmp_path / folder / "who"
        (tmp_path / folder / "bin").mkdir(parents=True)
        program.write_text(f"""#!/bin/sh\necho '{{"status": {{"token": "{token}"}}}}'\n""")
        program.chmod(0o700)
    (tmp_path / "home/config").write_text(config(f"{{exec: {{apiVersion: v1, command: {command}}}}}"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path / "work")
    found = kubeconfig.find(Path("../home/config"))
    assert await found.headers() == {"Authorization": f"Bearer {'mine' if named else 'path'}"}


async def test_a_program_that_is_not_there() -> None:
    plugin = "{exec: {apiVersion: client.authentication.k8s.io/v1, command: /no/such/program}}"
    with pytest.raises(UserError, match="credential plug-in /no/such/program gave no credential"):
        await kubeconfig.from_kubeconfig(config(plugin)).headers()


async def until_nobody_names(folder: Path) -> None:
    """No process has the folder among its arguments, neither the plug-in nor its children; one that is a zombie has none."""
    async with asyncio.timeout(120):
        while any(str(folder) in (each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])):  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.01)


def test_plain_http_for_a_proxy_on_this_machine() -> None:
    assert kubeconfig.from_kubeconfig(config("{}", server="http://127.0.0.1:8001/")).tls is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "- a",
        "a: {",
        "[" * 5000,
        "a: " + "9" * 5000,
        "contexts: {a: b}\ncurrent-context: a",
        config("{}").replace("here, context", "there, context"),
    ],
)
def test_no_kubeconfig(text: str) -> None:
    with pytest.raises(UserError, match="must be a kubeconfig with a current context"):
        kubeconfig.from_kubeconfig(text)


async def test_a_pod_in_its_own_cluster(tmp_path: Path) -> None:
    for name, text in (("token", b"t"), ("ca.crt", CA.certificate), ("namespace", b"streamrl")):
        (tmp_path / name).write_bytes(text)
    found = kubeconfig.from_service_account(
        tmp_path, {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    )
    assert (found.server, found.namespace) == ("https://[fd00::1]:6443", "streamrl")
    assert await found.headers() == {"Authorization": "Bearer t"}


def test_neither_kubeconfig_nor_service_account(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="KUBECONFIG: must be set where no service account is mounted"):
        kubeconfig.from_service_account(tmp_path, {})


def test_no_key_is_clean_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pair = KeyPair(certificate=USER.certificate, key=USER.key)
    kubeconfig.from_kubeconfig(
        config(f"{{client-certificate-data: {b64(pair.certificate)}, client-key-data: {b64(pair.key)}}}")
    )
    assert list(tmp_path.iterdir()) == []


async def test_a_members_kubeconfig_says_where_and_who_and_no_more() -> None:
    authority = f", certificate-authority-data: {b64(CA.certificate)}, insecure-skip-tls-verify: false"
    found = kubeconfig.of_member(config("{token: abc}", cluster=authority), source="Secret s")
    assert await found.headers() == {"Authorization": "Bearer abc"}
    assert found.tls is not None
    assert found.tls.verify_mode == ssl.CERT_REQUIRED


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (config("{exec: {command: x, apiVersion: v1}}"), "user may have only"),
        (config("{tokenFile: /etc/passwd}"), "user may have only"),
        (config("{client-certificate: /a, client-key: /b}"), "user may have only"),
        (config("{auth-provider: {name: gcp}}"), "user may have only"),
        (config("{username: a, password: b}"), "user may have only"),
        (config("{token: t, as: admin}"), "user may have only"),
        (config("{token: t}", cluster=", insecure-skip-tls-verify: true"), "cluster may have only"),
        (config("{token: t}", cluster=", certificate-authority: /a"), "cluster may have only"),
        (config("{token: t}", cluster=", proxy-url: http://p"), "cluster may have only"),
        (config("{token: t}", server="http://api.example"), "cluster.server must begin with https://"),
        (config("{token: t}", cluster=", certificate-authority-data: '!'"), "must be a certificate in base64"),
        ("[", "must be a kubeconfig"),
        ("{}", "must be a kubeconfig"),
        ("a: !!python/object/apply:os.system [x]", "must be a kubeconfig"),
    ],
)
def test_a_members_kubeconfig_that_reaches_out_is_refused_in_a_line(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as refused:
        kubeconfig.of_member(text, source="Secret s")
    assert "\n" not in str(refused.value)


WITHOUT_KEEP_ALIVE = """
import asyncio, socket, sys
for option in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT"):
    if hasattr(socket, option):
        delattr(socket, option)
from streamrl_pages.http_client import session

async def main(server):
    async with session(tls=None, agent="test") as made, made.get(server) as answer:
        print(await answer.read())

asyncio.run(main(sys.argv[1]))
"""


async def test_connections_where_a_system_has_other_options_of_keep_alive() -> None:
    """macOS has no TCP_KEEPIDLE."""
    async with hostile_server.serve(lambda _, writer: writer.write(hostile_server.whole(200, b"hello"))) as server:
        asked = await asyncio.create_subprocess_exec(
            sys.executable, "-c", WITHOUT_KEEP_ALIVE, server, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await asyncio.wait_for(asked.communicate(), 60)
    assert out.decode().strip() == "b'hello'"
