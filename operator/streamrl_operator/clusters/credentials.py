"""The kubeconfig of a member, from what its RLCluster names as source: a Secret of the operator's namespace, and for a ClusterProfile
(multicluster.x-k8s.io) the server that the inventory says.

Whoever writes a profile says where a token is sent. So the RLCluster, an administrator's, names the Secret, and the profile never does:
its `clusterName` for the plug-in `secretreader` is not read. No plug-in is started. What comes out is checked as any kubeconfig of a member
(`kubeconfig.of_member`), so a profile with a proxy, or without verified TLS, is refused.
"""

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

from streamrl.clusters import ClusterSource
from streamrl.errors import UserError
from streamrl_operator.kube.answers import NotFoundError
from streamrl_operator.kube.client import Client
from streamrl_operator.kube.kinds import CLUSTER_PROFILE, SECRET

KUBECONFIG_KEY, TOKEN_KEY = "kubeconfig", "token"
_LISTS = ("accessProviders", "credentialProviders")
"""Of a profile's status; the second one is the name of before, and the first one wins."""


async def kubeconfig_of(source: ClusterSource, *, client: Client, namespace: str) -> str:
    """Read it anew. `namespace`: of the operator.

    Raises:
        KubeError: home gave no answer.
        UserError: something is not there, or is not what it must be.
    """
    if source.cluster_profile is None:
        assert source.kubeconfig_secret_name is not None, "one of the two is given"
        name = source.kubeconfig_secret_name
        return await _of_secret(client, namespace, name, key=KUBECONFIG_KEY, fix="streamrl cluster join makes it")
    chosen = source.cluster_profile
    field = f"ClusterProfile {chosen.namespace}/{chosen.name}"
    try:
        profile = await client.get(CLUSTER_PROFILE, namespace=chosen.namespace, name=chosen.name)
    except NotFoundError:
        raise UserError(field=field, rule=f"must be there, of {CLUSTER_PROFILE.api_version}") from None
    cluster = cluster_of(profile, provider=chosen.provider, field=field)
    fix = f"it holds the token of the member under the key {TOKEN_KEY}"
    token = await _of_secret(client, namespace, chosen.token_secret_name, key=TOKEN_KEY, fix=fix)
    return _kubeconfig(cluster, token=token.strip())


def cluster_of(profile: Mapping[str, Any], *, provider: str, field: str) -> dict[str, Any]:
    """Address and trust of the cluster as a provider of the profile says, without what is meant for its plug-in.

    Raises:
        UserError: there is no such provider. `field` names the profile.
    """
    status = profile.get("status") or {}
    found = [one for name in _LISTS for one in status.get(name) or () if one["name"] == provider]
    if not found:
        known = ", ".join(one["name"] for name in _LISTS for one in status.get(name) or ()) or "none"
        rule = f"must have a provider {provider} in status.{_LISTS[0]}; it has {known}"
        raise UserError(field=field, rule=rule, fix="name another one in source.clusterProfile.provider")
    return {key: value for key, value in (found[0].get("cluster") or {}).items() if key != "extensions"}


def _kubeconfig(cluster: Mapping[str, Any], *, token: str) -> str:
    named = {
        "clusters": [{"name": "member", "cluster": cluster}],
        "users": [{"name": "member", "user": {"token": token}}],
        "contexts": [{"name": "member", "context": {"cluster": "member", "user": "member"}}],
    }
    return json.dumps({"apiVersion": "v1", "kind": "Config", "current-context": "member", **named})


async def _of_secret(client: Client, namespace: str, name: str, *, key: str, fix: str) -> str:
    field = f"Secret {namespace}/{name}"
    try:
        found = await client.get(SECRET, namespace=namespace, name=name)
    except NotFoundError:
        raise UserError(field=field, rule="must be there", fix=fix) from None
    try:
        return base64.b64decode((found.get("data") or {})[key], validate=True).decode()
    except (KeyError, ValueError, binascii.Error):
        raise UserError(field=field, rule=f"must have a {key} under the key {key}") from None
