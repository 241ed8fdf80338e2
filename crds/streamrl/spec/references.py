"""Secrets and claims that a pod names, also within pieces that go to the API server as they are; which of them are the job's own."""

from collections.abc import Iterator, Mapping
from typing import Any

from streamrl import names
from streamrl.spec.base import FieldRule, minimal


def references(piece: object, *, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (kind, name) of every Secret and claim that a piece of a pod names.

    CSI drivers read the keys of their attributes in any case, some with dashes: `secretname`, `secret-name`.
    """
    if isinstance(piece, Mapping):
        if key.lower().endswith(("secret", "secretref", "secretkeyref")) and isinstance(piece.get("name"), str):
            yield "Secret", piece["name"]
        if key in ("dataSource", "dataSourceRef") and isinstance(piece.get("name"), str):  # a claim that is copied
            yield "claim", piece["name"]
        for inner, value in piece.items():
            yield from references(value, key=inner)
    elif isinstance(piece, list | tuple):
        for value in piece:
            yield from references(value, key=key)
    elif isinstance(piece, str) and key.lower().replace("-", "").endswith(("secretname", "pullsecrets")):
        yield "Secret", piece
    elif isinstance(piece, str) and key in ("claimName", "resourceClaimName"):
        yield "claim", piece


def _own(job: Any) -> str:  # noqa: ANN401 - an RLJob, whose module has this rule
    """Return the first of the job's own Secrets and claims that a pod of it names, and which pod."""
    name, pods = job.metadata.name, {"trainer": job.spec.trainer.pod}
    own, leaves = (names.ca_secret(name), names.journal_claim(name)), names.tls_secret(name, "")
    pods |= {f"pool {pool.name}": pool.pod for pool in job.spec.pools}
    found = ((each, of) for of, pod in pods.items() for _, each in references(minimal(pod)))
    return next((f"{each} in the pod of {of}" for each, of in found if each in own or each.startswith(leaves)), "")


def _named(pod: str) -> str:
    """Write in CEL that no typed piece of the pod names one: an API server does not see into the others."""
    places = {
        "volumes.filter(e, has(e.secret))": "secret.secretName",
        "volumes.filter(e, has(e.persistentVolumeClaim))": "persistentVolumeClaim.claimName",
        "env.filter(e, has(e.valueFrom) && has(e.valueFrom.secretKeyRef))": "valueFrom.secretKeyRef.name",
        "envFrom.filter(e, has(e.secretRef))": "secretRef.name",
    }
    found = " + ".join(f"{pod}.{items}.map(e, e.{name})" for items, name in places.items())
    own = ", ".join(f"self.metadata.name + '{suffix}'" for suffix in (names.ca_secret(""), names.journal_claim("")))
    return f"({found}).all(n, !(n in [{own}] || n.startsWith(self.metadata.name + '{names.tls_secret('', '')}')))"


OWN_OBJECTS_RULE = FieldRule(
    "pods must not name the job's own Secrets and journal (<job>-ca, <job>-tls-..., <job>-journal): "
    "they are for StreamRL's containers; use others",
    f"{_named('self.spec.trainer.pod')} && self.spec.generators.all(g, {_named('g.pod')}) && "
    f"(!has(self.spec.task.agent) || !has(self.spec.task.agent.pool) || {_named('self.spec.task.agent.pool.pod')})",
    _own,
)
