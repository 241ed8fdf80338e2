"""Two clusters on this machine, a hub and a member, that reach each other over a link alone.

    with TwoClusters() as two:
        two.link.cut()
        two.hub.kubectl(...)

    this machine (tests) --veth--> hub's namespace:    control plane, node, pods; `wan` 10.201.N.1
                                          | link.py: delay, rate, loss, cut; bytes counted
    this machine (tests) --veth--> member's namespace: control plane, node, pods; `wan` 10.201.M.1

Tests reach both by their kubeconfigs whatever the link does. From within the hub's namespace (by `hub.settings.enter`, or in a pod)
the member's API server is at `seen_from_hub`, and from the member all that listens in the hub's namespace, NodePorts too, is at
`hub.addresses.wan`.
"""

from pathlib import Path
from types import TracebackType
from typing import Self

from cluster.harness import kubeconfigs, leftovers, network
from cluster.harness.cluster import NodeCluster
from cluster.harness.delay_line import Shape
from cluster.harness.link import WAN, End, LaidLink


class TwoClusters:
    """Two clusters, the hub with our CRDs, and the link between them; all are gone after `close`."""

    def __init__(self, shape: Shape = WAN) -> None:
        self._shape = shape
        self._addresses = [network.claim_addresses(), network.claim_addresses()]
        self._opened: list[NodeCluster | LaidLink] = []
        """In the order in which they were made."""
        try:
            self.hub, self.member = (self._open_cluster(addresses) for addresses in self._addresses)
            self.hub.apply_crds()
            self.link = self._lay()
        except BaseException:
            self.close()
            raise

    def _open_cluster(self, addresses: network.Addresses) -> NodeCluster:
        cluster = NodeCluster(apart=True, addresses=addresses)
        self._opened.append(cluster)
        cluster.load("worker-test")
        return cluster

    def _lay(self) -> LaidLink:
        hub, member = (
            End(sandbox=cluster.the_node.sandbox, address=cluster.addresses.wan) for cluster in (self.hub, self.member)
        )
        link = LaidLink(hub, member, self._shape, folder=self.hub.folder, mark=self.hub.mark)
        self._opened.append(link)
        return link

    def remake_member(self) -> None:
        """Another cluster at the member's address: nothing of the old one is left, and the link is laid anew."""
        place = self.member.the_node.place
        while len(self._opened) > 1:
            self._opened.pop().close()
        leftovers.wait_gone(*place)
        self.member = self._open_cluster(self._addresses[1])
        self.link = self._lay()

    def seen_from_hub(self, kubeconfig: Path | None = None) -> Path:
        """Write a kubeconfig of the member, the administrator's or the one given, for use from within the hub."""
        original = kubeconfig or self.member.kubeconfig
        server = f"https://{self.member.addresses.wan}:{self.member.port}"
        return kubeconfigs.elsewhere(original.with_suffix(".from-hub.json"), original, server=server)

    @property
    def use(self) -> str:
        """What a person needs to know."""
        return f"""export KUBECONFIG={self.hub.kubeconfig}          # the hub
export MEMBER_KUBECONFIG={self.member.kubeconfig}   # the member, whatever the link does
the member as the hub sees it:  {self.seen_from_hub()}
the hub as the member sees it:  {self.hub.addresses.wan}, with all NodePorts
a command in the hub's network: {" ".join(self.hub.settings.enter)} COMMAND
in the member's:                {" ".join(self.member.settings.enter)} COMMAND
the link:                       make cluster-link ARGS="state | cut | heal | slow MBIT [RTT_MS] | lossy SHARE"
"""

    def close(self) -> None:
        """End all of it."""
        while self._opened:
            self._opened.pop().close()
        for addresses in self._addresses:
            addresses.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
