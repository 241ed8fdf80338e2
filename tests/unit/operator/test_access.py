"""How an API server is reached: kubeconfigs as kubectl takes them, service accounts, tokens that change."""

import base64
import ssl
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from streamrl.errors import UserError
from streamrl_operator.certificates import issue
from streamrl_operator.certificates.issue import Holder, Pair
from streamrl_operator.certificates.plan import Lives
from streamrl_operator.kube import access

NOW = datetime.now(UTC)
CA = issue.new_ca("test", now=NOW, lives=Lives())
USER = issue.new_leaf(Holder(namespace="n", job="test", role="generator"), ca=CA, now=NOW, lives=Lives())


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


async def test_a_token() -> None:
    found = access.from_kubeconfig(config("{token: abc}"))
    assert (found.server, found.namespace) == ("https://api.example:6443", "lab")
    assert await found.headers(now_s=0.0) == {"Authorization": "Bearer abc"}
    assert found.tls is not None
    assert found.tls.verify_mode == ssl.CERT_REQUIRED


async def test_certificates_inline_and_from_files(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_bytes(CA.certificate)
    (tmp_path / "user.pem").write_bytes(USER.certificate)
    inline = f"{{client-certificate-data: {b64(USER.certificate)}, client-key-data: {b64(USER.key)}}}"
    authority = f", certificate-authority-data: {b64(CA.certificate)}"
    files = f"{{client-certificate: user.pem, client-key-data: {b64(USER.key)}}}"
    for user, cluster in ((inline, authority), (files, ", certificate-authority: ca.pem")):
        found = access.from_kubeconfig(config(user, cluster=cluster), base=tmp_path)
        assert await found.headers(now_s=0.0) == {}
        assert found.tls is not None
        assert len(found.tls.get_ca_certs()) == 1


async def test_a_token_file_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("one\n")
    found = access.from_kubeconfig(config("{tokenFile: token}"), base=tmp_path)
    assert await found.headers(now_s=0.0) == {"Authorization": "Bearer one"}
    (tmp_path / "token").write_text("two\n")
    assert await found.headers(now_s=30.0) == {"Authorization": "Bearer one"}
    assert await found.headers(now_s=61.0) == {"Authorization": "Bearer two"}
    (tmp_path / "token").write_text("three\n")
    found.forget()
    assert await found.headers(now_s=62.0) == {"Authorization": "Bearer three"}


async def test_a_credential_plug_in() -> None:
    script = "import os, json; asked = json.loads(os.environ['KUBERNETES_EXEC_INFO']); "
    script += "print(json.dumps({'status': {'token': asked['kind'] + os.environ['WHO']}}))"
    plugin = f"""{{exec: {{apiVersion: client.authentication.k8s.io/v1, command: "{sys.executable}",
        args: ["-c", "{script}"], env: [{{name: WHO, value: -me}}]}}}}"""
    found = access.from_kubeconfig(config(plugin))
    assert await found.headers(now_s=0.0) == {"Authorization": "Bearer ExecCredential-me"}


async def test_a_credential_plug_in_that_fails() -> None:
    plugin = "{exec: {apiVersion: client.authentication.k8s.io/v1, command: /no/such/program}}"
    with pytest.raises(UserError, match="credential plug-in /no/such/program gave no credential"):
        await access.from_kubeconfig(config(plugin)).headers(now_s=0.0)


def test_plain_http_for_a_proxy_on_this_machine() -> None:
    assert access.from_kubeconfig(config("{}", server="http://127.0.0.1:8001/")).tls is None


@pytest.mark.parametrize("text", ["", "- a", "a: {", config("{}").replace("here, context", "there, context")])
def test_no_kubeconfig(text: str) -> None:
    with pytest.raises(UserError, match="must be a kubeconfig with a current context"):
        access.from_kubeconfig(text)


async def test_a_pod_in_its_own_cluster(tmp_path: Path) -> None:
    for name, text in (("token", b"t"), ("ca.crt", CA.certificate), ("namespace", b"streamrl")):
        (tmp_path / name).write_bytes(text)
    found = access.from_service_account(
        tmp_path, {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    )
    assert (found.server, found.namespace) == ("https://[fd00::1]:6443", "streamrl")
    assert await found.headers(now_s=0.0) == {"Authorization": "Bearer t"}


def test_neither_kubeconfig_nor_service_account(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="KUBECONFIG: must be set where no service account is mounted"):
        access.from_service_account(tmp_path, {})


def test_no_key_is_left_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pair = Pair(certificate=USER.certificate, key=USER.key)
    access.from_kubeconfig(
        config(f"{{client-certificate-data: {b64(pair.certificate)}, client-key-data: {b64(pair.key)}}}")
    )
    assert list(tmp_path.iterdir()) == []
