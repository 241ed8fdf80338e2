"""NetworkPolicies as nftables rules, pure: objects in, one script out that replaces all rules at once.

A pod that a policy selects has a chain per direction: what a rule allows returns, the rest is dropped. A packet is seen
after kube-proxy has put a pod's address in the place of a Service's, and before any source address is changed. Connections that are open stay
open; what comes from the node itself (probes) does not pass the forward hook and is always allowed, as Kubernetes has it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TABLE = "streamrl_policy"
Object = Mapping[str, Any]
ENDED = ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A pod as policies see it."""

    namespace: str
    address: str
    labels: Mapping[str, str]
    ports: Mapping[tuple[str, str], int]
    """(protocol, name) → number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """All that peers are chosen from."""

    endpoints: Sequence[Endpoint]
    labels: Mapping[str, Mapping[str, str]]
    """Of namespaces, by name."""

    def peers(self, peer: Object, home: str) -> list[Endpoint]:
        """Pods that a peer of a policy in namespace `home` means."""
        if "ipBlock" in peer:
            return []
        return [one for one in self.endpoints if self._is_peer(peer, one, home)]

    def _is_peer(self, peer: Object, pod: Endpoint, home: str) -> bool:
        if "namespaceSelector" in peer:
            here = matches(peer["namespaceSelector"], self.labels.get(pod.namespace, {}))
        else:
            here = pod.namespace == home
        return here and matches(peer.get("podSelector", {}), pod.labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Direction:
    """Into a pod or out of it."""

    name: str
    peers: str
    """Key of a rule's peers."""
    own: str
    """nftables' word for the pod's own address, and for the other side's."""
    other: str


EGRESS = Direction(name="Egress", peers="to", own="saddr", other="daddr")
INGRESS = Direction(name="Ingress", peers="from", own="daddr", other="saddr")


def script(policies: Iterable[Object], pods: Iterable[Object], namespaces: Iterable[Object]) -> str:
    """The rules of a cluster, as `nft -f` reads them."""
    endpoints = sorted(filter(None, map(_endpoint, pods)), key=lambda one: one.address)
    labels = {one["metadata"]["name"]: one["metadata"].get("labels", {}) for one in namespaces}
    world = World(endpoints=endpoints, labels=labels)
    ordered = sorted(policies, key=lambda one: (one["metadata"]["namespace"], one["metadata"]["name"]))
    chains: list[str] = []
    jumps: list[str] = []
    for direction in (EGRESS, INGRESS):
        verdicts = []
        for pod in endpoints:
            if selecting := [one for one in ordered if _selects(one, pod, direction)]:
                name = f"{direction.name.lower()}_{pod.address.replace('.', '_')}"
                chains.append(_chain(name, pod, selecting, direction, world))
                verdicts.append(f"{pod.address} : jump {name}")
        if verdicts:
            jumps.append(f"    ip {direction.own} vmap {{ {', '.join(verdicts)} }}\n")
    forward = "    type filter hook forward priority -5; policy accept;\n    ct state established,related accept\n"
    table = f"table inet {TABLE} {{\n{''.join(chains)}  chain forward {{\n{forward}{''.join(jumps)}  }}\n}}\n"
    return f"table inet {TABLE} {{}}\ndelete table inet {TABLE}\n{table}"


def _chain(name: str, pod: Endpoint, selecting: list[Object], direction: Direction, world: World) -> str:
    """What one pod is allowed in one direction; nobody can keep it from itself."""
    lines = [line for policy in selecting for line in _allowed(policy, pod, direction, world)]
    body = "".join(f"    {line} return\n" for line in dict.fromkeys(lines))
    return f"  chain {name} {{\n    ip {direction.other} {pod.address} return\n{body}    counter drop\n  }}\n"


def _endpoint(pod: Object) -> Endpoint | None:
    status, spec = pod.get("status", {}), pod["spec"]
    if spec.get("hostNetwork") or not status.get("podIP") or status.get("phase") in ENDED:
        return None
    containers = [*spec["containers"], *spec.get("initContainers", ())]
    ports = {
        (port.get("protocol", "TCP"), port["name"]): port["containerPort"]
        for container in containers
        for port in container.get("ports", ())
        if "name" in port
    }
    metadata = pod["metadata"]
    return Endpoint(
        namespace=metadata["namespace"], address=status["podIP"], labels=metadata.get("labels", {}), ports=ports
    )


def _selects(policy: Object, pod: Endpoint, direction: Direction) -> bool:
    spec = policy["spec"]
    types = spec.get("policyTypes") or ["Ingress", *(["Egress"] if "egress" in spec else [])]
    return (
        direction.name in types
        and policy["metadata"]["namespace"] == pod.namespace
        and matches(spec.get("podSelector", {}), pod.labels)
    )


def matches(selector: Object, labels: Mapping[str, str]) -> bool:
    """Whether a label selector takes these labels; an empty one takes all."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    return all(_meets(one, labels) for one in selector.get("matchExpressions", ()))


def _meets(requirement: Object, labels: Mapping[str, str]) -> bool:
    value = labels.get(requirement["key"])
    match requirement["operator"]:
        case "In":
            return value in requirement["values"]
        case "NotIn":
            return value not in requirement["values"]
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
    raise ValueError(f"matchExpressions.operator: not known: {requirement['operator']!r}")


def _allowed(policy: Object, pod: Endpoint, direction: Direction, world: World) -> Iterator[str]:
    """Matches that a policy allows to or from one pod, without the verdict."""
    home = policy["metadata"]["namespace"]
    for rule in policy["spec"].get(direction.name.lower()) or ():
        peers = rule.get(direction.peers) or []
        for port in rule.get("ports") or [None]:
            if port is None or not isinstance(port.get("port"), str):
                for match in _peers(peers, home, direction, world):
                    yield f"{match}{_port(port)}".strip() or "meta nfproto ipv4"
            elif direction is INGRESS:
                key = _key(port)
                for match in _peers(peers, home, direction, world) if key in pod.ports else ():
                    yield f"{match}{_port({'protocol': key[0], 'port': pod.ports[key]})}".strip()
            else:
                yield from _named_there(port, peers, home, world)


def _key(port: Object) -> tuple[str, str]:
    return port.get("protocol", "TCP"), port["port"]


def _named_there(port: Object, peers: list[Object], home: str, world: World) -> Iterator[str]:
    """A port by name on the way out: each destination has its own number for it."""
    key = _key(port)
    there = [one for peer in peers for one in world.peers(peer, home)] if peers else world.endpoints
    for one in there:
        if key in one.ports:
            yield f"ip daddr {one.address}{_port({'protocol': key[0], 'port': one.ports[key]})}"


def _peers(peers: list[Object], home: str, direction: Direction, world: World) -> Iterator[str]:
    """Matches of the other side's address; one empty match where everybody is allowed."""
    if not peers:
        yield ""
    for peer in peers:
        if "ipBlock" in peer:
            besides = peer["ipBlock"].get("except")
            but = f" ip {direction.other} != {{ {', '.join(besides)} }}" if besides else ""
            yield f"ip {direction.other} {peer['ipBlock']['cidr']}{but}"
        elif found := [one.address for one in world.peers(peer, home)]:
            yield f"ip {direction.other} {{ {', '.join(found)} }}"


def _port(port: Object | None) -> str:
    if port is None:
        return ""
    protocol = port.get("protocol", "TCP").lower()
    if port.get("port") is None:
        return f" meta l4proto {protocol}"
    return f" {protocol} dport {port['port']}" + (f"-{port['endPort']}" if "endPort" in port else "")
