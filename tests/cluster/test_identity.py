"""Kubeconfigs of every kind at a real API server: it knows us as it knows kubectl, in the operator and in the commands."""

import base64
import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from cluster.harness import kubeconfigs
from cluster.harness.control_plane import ControlPlane
from cluster.harness.flags import Settings
from cluster.harness.processes import wait_until
from cluster.operators import SOON_S, Lab, Operator
from streamrl import keys
from streamrl_operator.kube.connections import ApiConnection
from streamrl_operator.kube.kubeconfig import find
from support.command import streamrl
from support.connect_proxy import ConnectProxy
from support.jobs import simulated_job
from support.oidc_issuer import CLIENT, OidcIssuer

pytestmark = pytest.mark.timeout(300)

REVIEW = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
INSIDE = "kubernetes.default.svc"
"""A name in the API server's certificate."""
OPERATOR = "operator-behind-a-proxy"
ISSUER_READ_S = 60.0
"""The API server asks an issuer for its keys every ten seconds, until it has them."""


@pytest.fixture(scope="module")
def issuer() -> Iterator[OidcIssuer]:
    with OidcIssuer() as served:
        yield served


@pytest.fixture(scope="module")
def plane(
    own_control_plane: ControlPlane, issuer: OidcIssuer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControlPlane]:
    """A control plane that believes the issuer, where whoever is known may do all."""
    del own_control_plane  # where that cannot be had, this one cannot either
    authority = tmp_path_factory.mktemp("issuer") / "ca.pem"
    authority.write_bytes(issuer.authority.pem)
    flags = {"issuer-url": issuer.url, "client-id": CLIENT, "ca-file": authority, "groups-claim": "groups"}
    flags |= {"username-prefix": "oidc:", "groups-prefix": "oidc:"}
    settings = Settings(apiserver_flags=tuple(f"--oidc-{name}={value}" for name, value in flags.items()))
    with ControlPlane(settings) as made:
        made.apply_crds()
        made.kubectl(
            "create", "clusterrolebinding", "all", "--clusterrole=cluster-admin", "--group=system:authenticated"
        )
        yield made


@pytest.fixture(scope="module")
def proxy(plane: ControlPlane) -> Iterator[ConnectProxy]:
    with ConnectProxy(plane.port) as served:
        yield served


def parts(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(cluster, user) of a kubeconfig."""
    return kubeconfigs.current(json.loads(path.read_text()))


def plug_in(folder: Path, **status: str) -> dict[str, Any]:
    """`user` with a program that prints a credential."""
    version = "client.authentication.k8s.io/v1"
    printed = shlex.quote(json.dumps({"apiVersion": version, "kind": "ExecCredential", "status": status}))
    program = folder / "credential"
    program.write_text(f"#!/bin/sh\nprintf %s {printed}\n")
    program.chmod(0o700)
    return {"exec": {"apiVersion": version, "command": str(program), "interactiveMode": "Never"}}


class Kubeconfigs:
    """Writes a kubeconfig of each kind; each is another file."""

    def __init__(self, plane: ControlPlane, issuer: OidcIssuer, proxy: ConnectProxy, folder: Path) -> None:
        self._plane, self._issuer, self._proxy, self._folder = plane, issuer, proxy, folder
        self._cluster, self._ada = parts(plane.kubeconfig_for("ada"))
        self._token = parts(plane.kubeconfig_of_account("default", "default"))[1]["token"]

    def write(self, kind: str) -> Path:
        """As its method says."""
        user, cluster = getattr(self, kind)()
        path = self._folder / f"{kind}-{len(list(self._folder.iterdir()))}.json"
        return kubeconfigs.compose(path, self._cluster | cluster, user)

    def token(self) -> Any:
        return {"token": self._token}, {}

    def certificate(self) -> Any:
        return self._ada, {}

    def exec_token(self) -> Any:
        return plug_in(self._folder, token=self._token), {}

    def exec_certificate(self) -> Any:
        pair = (base64.b64decode(self._ada[f"client-{part}-data"]).decode() for part in ("certificate", "key"))
        return plug_in(self._folder, **dict(zip(("clientCertificateData", "clientKeyData"), pair, strict=True))), {}

    def oidc(self) -> Any:
        return self._issuer.provider(**{"id-token": self._issuer.id_token("eve", groups=("writers",))}), {}

    def oidc_renewed(self) -> Any:
        ended = {"id-token": self._issuer.id_token("ada", life_s=-60), "refresh-token": self._issuer.refresh_token}
        return self._issuer.provider(**ended), {}

    def proxied(self) -> Any:
        way = {"server": "https://nowhere.invalid:6443", "tls-server-name": INSIDE, "proxy-url": self._proxy.url}
        return self._ada, way

    def impersonated(self) -> Any:
        extra = {"as-uid": "7", "as-user-extra": {"example.com/why": ["a", "b"]}}
        return self._ada | {"as": "bob", "as-groups": ["x", "y"], **extra}, {}


@pytest.fixture
def written(plane: ControlPlane, issuer: OidcIssuer, proxy: ConnectProxy, tmp_path: Path) -> Callable[[str], Path]:
    return Kubeconfigs(plane, issuer, proxy, tmp_path).write


async def who_am_i(path: Path) -> tuple[int, dict[str, Any]]:
    """(status, what the API server takes us for)."""
    async with (
        aclosing(ApiConnection(find(path), agent="test")) as connection,
        connection.request(
            "POST",
            f"/apis/{REVIEW['apiVersion']}/selfsubjectreviews",
            timeout=aiohttp.ClientTimeout(total=60.0),
            headers={"Content-Type": "application/json"},
            data=json.dumps(REVIEW).encode(),
        ) as answer,
    ):
        return answer.status, json.loads(await answer.read()).get("status", {}).get("userInfo", {})


WHO = {
    "token": ("system:serviceaccount:default:default", "system:serviceaccounts"),
    "certificate": ("ada", "system:authenticated"),
    "exec_token": ("system:serviceaccount:default:default", "system:serviceaccounts"),
    "exec_certificate": ("ada", "system:authenticated"),
    "oidc": ("oidc:eve", "oidc:writers"),
    "oidc_renewed": ("oidc:ada", "oidc:readers"),
    "proxied": ("ada", "system:authenticated"),
    "impersonated": ("bob", "y"),
}


@pytest.mark.parametrize("kind", WHO)
async def test_an_api_server_knows_us_as_it_knows_kubectl(
    kind: str, plane: ControlPlane, written: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    def kubectl() -> Any:
        done = plane.kubectl("auth", "whoami", "-o", "json", kubeconfig=written(kind), check=False)
        return json.loads(done.stdout)["status"]["userInfo"] if done.returncode == 0 else None

    wait_until(lambda: kubectl() is not None, what="the API server to know kubectl", deadline_s=ISSUER_READ_S)
    status, ours = await who_am_i(written(kind))
    theirs = kubectl()
    varies = "authentication.kubernetes.io/credential-id"
    for each in (ours, theirs):
        each.get("extra", {}).pop(varies, None)
    assert (status, ours) == (201, theirs)
    name, group = WHO[kind]
    assert ours["username"] == name
    assert group in ours["groups"]


@pytest.mark.parametrize("kind", WHO)
def test_the_commands_take_it(
    kind: str, written: Callable[[str], Path], capsys: pytest.CaptureFixture[str], issuer: OidcIssuer
) -> None:
    outcome = streamrl(capsys, "status", "--kubeconfig", str(written(kind)), "-n", "default")
    assert (outcome.code, outcome.err) == (0, [])


async def test_a_name_that_its_certificate_does_not_have_is_refused(
    plane: ControlPlane, written: Callable[[str], Path], tmp_path: Path
) -> None:
    cluster, user = parts(written("certificate"))
    path = kubeconfigs.compose(tmp_path / "other.json", cluster | {"tls-server-name": "elsewhere.example"}, user)
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        await who_am_i(path)


def test_the_operator_works_through_a_proxy(plane: ControlPlane, proxy: ConnectProxy, tmp_path: Path) -> None:
    """Its own requests and kopf's: the address of the server leads nowhere, so all else would fail."""
    namespace = "proxied"
    plane.api.create("/api/v1/namespaces", {"metadata": {"name": namespace}}).expect()
    cluster, user = parts(plane.kubeconfig_for(OPERATOR))
    way = {"server": "https://nowhere.invalid:6443", "tls-server-name": INSIDE, "proxy-url": proxy.url}
    path = kubeconfigs.compose(tmp_path / "operator.json", cluster | way, user)
    operator, lab = (
        Operator(plane, namespace, user=OPERATOR, **{keys.ENV_KUBECONFIG: str(path)}).start(),
        Lab(plane, namespace),
    )
    try:
        operator.wait_until_leading()
        body = simulated_job()
        lab.create("rljobs", body)
        made = f"{body['metadata']['name']}-job"
        wait_until(lambda: lab.get("configmaps", made) is not None, what=made, deadline_s=SOON_S, log=operator.log)
        assert operator.metric("streamrl_operator_kopf_restarts") == 0
    finally:
        assert operator.stop() == 0, operator.tail()
    assert set(proxy.tunnels) == {"nowhere.invalid:6443"}
