"""Holds NetworkPolicies on a node: the plain bridge has nobody who does.

Owns one nftables table in the node's network namespace. What is allowed is decided in `policies.py`.
"""

from cluster.harness import policies
from cluster.harness.objects import Objects
from cluster.harness.processes import wait_until
from cluster.harness.sandbox import Sandbox

WATCHED = ("/apis/networking.k8s.io/v1/networkpolicies", "/api/v1/pods", "/api/v1/namespaces")
CURRENT_S = 60.0


class Enforcer:
    """Brings the rules to what the cluster says; `step` is called whenever policies, pods or namespaces changed."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self.enforced = ""

    def step(self, api: Objects) -> None:
        """Replace the rules if they are not what they should be."""
        wanted = wanted_rules(api)
        if wanted != self.enforced:
            self._sandbox.run("nft", "-f", "-", stdin=wanted)
            self.enforced = wanted

    def wait_current(self, api: Objects) -> None:
        """Wait until what the API server says now is enforced."""
        wait_until(
            lambda: wanted_rules(api) == self.enforced,
            what="the NetworkPolicies to be enforced",
            deadline_s=CURRENT_S,
        )


def wanted_rules(api: Objects) -> str:
    """The rules of the cluster as it is."""
    listed = [api.list(path) for path in WATCHED]
    return policies.script(*listed)
