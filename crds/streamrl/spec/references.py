"""Secrets and claims that a pod names, also within pieces that go to the API server as they are; which of them are the job's own."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

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


def _apart(pod: str, *, is_sparse: bool = False) -> str:
    """Write in CEL that no typed piece of the pod names `own`: an API server does not see into the others.

    `is_sparse`: it has no defaults (`tools/gen_crd.py`).
    """
    places = {
        "volumes.filter(e, has(e.secret))": "secret.secretName",
        "volumes.filter(e, has(e.persistentVolumeClaim))": "persistentVolumeClaim.claimName",
        "env.filter(e, has(e.valueFrom) && has(e.valueFrom.secretKeyRef))": "valueFrom.secretKeyRef.name",
        "envFrom.filter(e, has(e.secretRef))": "secretRef.name",
    }
    parts = [f"!{pod}.{items}.exists(e, e.{name} == own)" for items, name in places.items()]
    if not is_sparse:
        return " && ".join(parts)
    guarded = (f"(!has({pod}.{items.partition('.')[0]}) || {part})" for items, part in zip(places, parts, strict=True))
    return f"(!has({pod}) || {' && '.join(guarded)})"


_ROLES = ("scheduler", "trainer", "generator", names.AGENTS)
_OWN = [names.ca_secret(""), names.journal_claim(""), *(names.tls_secret("", role) for role in _ROLES)]
"""Ends of names that an API server looks for: whole, since a name has no bound for it, and each use costs."""
_AGENTS = "self.spec.task.agent.pool"


class _OwnObjectsRule(FieldRule):
    """The same rule, which sees into all pieces here."""

    def broken(self, model: BaseModel) -> str:
        """Return the rule with what is got; empty: it holds."""
        got = _own(model)
        return f"{self.message}, got {got}" if got else ""


OWN_OBJECTS_RULE = _OwnObjectsRule(
    "pods must not name the job's own Secrets and journal (<job>-ca, <job>-tls-..., <job>-journal): "
    "they are for StreamRL's containers; use others",
    f"{_OWN}.map(s, self.metadata.name + s).all(own, {_apart('self.spec.trainer.pod')} && "
    f"self.spec.generators.all(g, {_apart('g.pod', is_sparse=True)}) && "
    f"(!has(self.spec.task.agent) || !has({_AGENTS}) || {_apart(f'{_AGENTS}.pod')}))",
)
