"""The official Python client as a witness: what it reads in a kubeconfig, ours reads too.

And why it is no more than a witness (docs/decisions/0057): each fault of the release that was looked at is seen here.
A release that mends one makes its test fail, and the decision is to be looked at again.
"""

import base64
import json
import ssl
from pathlib import Path
from typing import Any

import pytest
from kubernetes.aio.client import Configuration
from kubernetes.aio.client.rest import RESTClientObject
from kubernetes.aio.config import ConfigException
from kubernetes.aio.config.kube_config import KubeConfigLoader, KubeConfigMerger
from kubernetes.aio.config.openid import OpenIDRequestor

from streamrl_operator.kube import kubeconfig
from support.certificates import Authority
from support.oidc_issuer import OidcIssuer

AUTHORITY = Authority()
LEAF = AUTHORITY.leaf("trainer")


def config(user: dict[str, Any], cluster: dict[str, Any]) -> dict[str, Any]:
    return {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": "https://api.example:6443/"} | cluster}],
        "users": [{"name": "u", "user": user}],
    }


async def theirs(config: Any, *, folder: Path | None = None) -> Configuration:
    """As the official client reads it."""
    found = Configuration()
    await KubeConfigLoader(config, config_base_path=str(folder or "")).load_and_set(found)
    return found


def b64(pem: bytes) -> str:
    return base64.b64encode(pem).decode()


PAIR = {"client-certificate-data": b64(LEAF.chain), "client-key-data": b64(LEAF.key_pem)}


@pytest.mark.parametrize("user", [{}, {"token": "t"}, PAIR, {"token": "t", **PAIR}])
@pytest.mark.parametrize(
    "cluster",
    [
        {},
        {"certificate-authority-data": b64(AUTHORITY.pem)},
        {"certificate-authority": "ca.pem", "tls-server-name": "inside"},
        {"insecure-skip-tls-verify": True, "proxy-url": "http://proxy.example:3128"},
        {"server": "http://localhost:8001"},
    ],
)
async def test_both_read_the_same(user: dict[str, Any], cluster: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_bytes(AUTHORITY.pem)
    given = config(user, cluster)
    ours = kubeconfig.from_kubeconfig(json.dumps(given), base=tmp_path)
    found = await theirs(given, folder=tmp_path)
    assert (ours.server, ours.proxy, ours.tls_server_name) == (found.host, found.proxy, found.tls_server_name)
    assert (await ours.headers()).get("Authorization") == found.api_key.get("BearerToken")
    if ours.tls is not None:
        tls: ssl.SSLContext = RESTClientObject(found).ssl_context
        assert (ours.tls.verify_mode, ours.tls.check_hostname) == (tls.verify_mode, tls.check_hostname)
        assert len(ours.tls.get_ca_certs()) == len(tls.get_ca_certs())


async def test_it_asks_an_oidc_issuer_without_a_look_at_its_certificate_or_not_at_all() -> None:
    with pytest.warns(DeprecationWarning):
        asks = OpenIDRequestor("client", "secret", "https://issuer.example")._get_connector()
    assert asks._ssl is False
    with pytest.raises(TypeError), pytest.warns(DeprecationWarning):
        OpenIDRequestor("client", "secret", "https://issuer.example", "/ca.pem")._get_connector()


async def test_it_cannot_read_an_id_token_with_the_characters_of_base64url() -> None:
    with OidcIssuer() as issuer:
        token = issuer.id_token("ada")
        assert set("-_") & set(token.split(".")[1])
        with pytest.raises(ValueError, match=r"base64|utf-8"):
            await theirs(config(issuer.provider(**{"id-token": token}), {}))


async def test_it_sends_the_end_of_a_tokens_line(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("one\n")
    found = await theirs(config({"tokenFile": "token"}, {}), folder=tmp_path)
    assert found.api_key["BearerToken"] == "Bearer one\n"


async def test_it_goes_on_as_nobody_where_a_plug_in_fails() -> None:
    plugin = {"apiVersion": "client.authentication.k8s.io/v1", "command": "/no/such/program"}
    assert (await theirs(config({"exec": plugin}, {}))).api_key == {}


async def test_it_knows_nothing_of_impersonation() -> None:
    found = await theirs(config({"token": "t", "as": "ada"}, {}))
    assert found.api_key == {"BearerToken": "Bearer t"}


async def test_of_several_files_the_last_names_the_context_and_an_error_quotes_secrets(tmp_path: Path) -> None:
    provider = {"auth-provider": {"name": "oidc", "config": {"refresh-token": "s3cret", "idp-issuer-url": "https://i"}}}
    (tmp_path / "one").write_text(json.dumps(config(provider, {})))
    (tmp_path / "two").write_text(json.dumps({"current-context": "there"}))
    merged = KubeConfigMerger(f"{tmp_path / 'one'}:{tmp_path / 'two'}").config
    assert merged["current-context"] == "there"
    merged.value["current-context"] = "here"
    with pytest.raises(ConfigException, match="s3cret"):
        await theirs(merged)
