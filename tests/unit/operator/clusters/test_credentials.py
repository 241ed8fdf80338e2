"""What a member's source becomes: a kubeconfig, in which nothing may start programs or send a token astray."""

import base64
from typing import Any

import pytest
from aiohttp import web

from streamrl.clusters import ClusterSource
from streamrl.errors import UserError
from streamrl.spec.parse import parse_document
from streamrl_operator.clusters.credentials import kubeconfig_of
from streamrl_operator.kube import kubeconfig
from streamrl_operator.kube.rest_config import RestConfig
from support.api_server import client_of

PROFILE = "/apis/multicluster.x-k8s.io/v1alpha1/namespaces/fleet/clusterprofiles/east"
TOKEN = "/api/v1/namespaces/streamrl/secrets/east-token"
CLUSTER = {"server": "https://192.0.2.7:6443"}


def source(**changes: Any) -> ClusterSource:
    profile = {"name": "east", "namespace": "fleet", "tokenSecretName": "east-token", **changes}
    return parse_document({"clusterProfile": profile}, model=ClusterSource, rule="must be a mapping")


def profile(**lists: Any) -> dict[str, Any]:
    metadata = {"name": "east", "namespace": "fleet", "uid": "u", "resourceVersion": "1"}
    return {
        "apiVersion": "multicluster.x-k8s.io/v1alpha1",
        "kind": "ClusterProfile",
        "metadata": metadata,
        "status": lists,
    }


def provider(name: str = "secretreader", **cluster: Any) -> dict[str, Any]:
    """As a cluster manager writes it, with the name of a Secret for the plug-in."""
    extension = {"name": "client.authentication.k8s.io/exec", "extension": {"clusterName": "somebody-elses"}}
    return {"name": name, "cluster": CLUSTER | cluster | {"extensions": [extension]}}


def secret(**data: str) -> dict[str, Any]:
    coded = {key: base64.b64encode(value.encode()).decode() for key, value in data.items()}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "east-token", "namespace": "streamrl", "uid": "s", "resourceVersion": "1"},
        "data": coded,
    }


async def read(objects: dict[str, Any], given: ClusterSource) -> RestConfig:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        if request.path in objects:
            return web.json_response(objects[request.path])
        return web.json_response({"kind": "Status", "code": 404, "reason": "NotFound", "message": "none"}, status=404)

    async with client_of(answer) as client:
        text = await kubeconfig_of(given, client=client, namespace="streamrl")
    assert set(asked) <= {PROFILE, TOKEN}, "no other Secret is read"
    return kubeconfig.of_member(text, source="the kubeconfig of RLCluster east")


@pytest.mark.parametrize(
    "lists",
    [
        {"accessProviders": [provider("other", server="https://192.0.2.9"), provider()]},
        {"credentialProviders": [provider()]},
        {"accessProviders": [provider()], "credentialProviders": [provider(server="https://192.0.2.9")]},
    ],
)
async def test_the_profile_says_the_server_and_the_secret_of_the_administrator_the_token(lists: dict[str, Any]) -> None:
    found = await read({PROFILE: profile(**lists), TOKEN: secret(token="t-1\n")}, source())
    assert found.server == CLUSTER["server"]
    assert await found.headers() == {"Authorization": "Bearer t-1"}
    assert found.source is None


async def test_another_provider_can_be_named() -> None:
    both = [provider("other", server="https://192.0.2.9"), provider()]
    found = await read({PROFILE: profile(accessProviders=both), TOKEN: secret(token="t")}, source(provider="other"))
    assert found.server == "https://192.0.2.9"


@pytest.mark.parametrize(
    ("objects", "line"),
    [
        ({}, "ClusterProfile fleet/east: must be there, of multicluster.x-k8s.io/v1alpha1"),
        (
            {PROFILE: profile(accessProviders=[provider("gke")])},
            "ClusterProfile fleet/east: must have a provider secretreader in status.accessProviders; it has gke; "
            "name another one in source.clusterProfile.provider",
        ),
        (
            {PROFILE: profile(accessProviders=[provider()])},
            "Secret streamrl/east-token: must be there; it holds the token of the member under the key token",
        ),
        (
            {PROFILE: profile(accessProviders=[provider()]), TOKEN: secret(other="t")},
            "Secret streamrl/east-token: must have a token under the key token",
        ),
        *(
            (
                {PROFILE: profile(accessProviders=[provider(**{field: value})]), TOKEN: secret(token="t")},
                "the kubeconfig of RLCluster east: cluster may have only certificate-authority-data, server, tls-server-name, got "
                f"'{field}'",
            )
            for field, value in (
                ("insecure-skip-tls-verify", True),
                ("proxy-url", "http://192.0.2.8"),
                ("certificate-authority", "/etc/passwd"),
            )
        ),
        (
            {PROFILE: profile(accessProviders=[provider(server="http://192.0.2.7")]), TOKEN: secret(token="t")},
            "the kubeconfig of RLCluster east: cluster.server must begin with https://, got 'http://192.0.2.7'",
        ),
    ],
)
async def test_what_cannot_be_honoured_safely_is_refused_in_one_line(objects: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as refused:
        await read(objects, source())
    assert str(refused.value) == line
