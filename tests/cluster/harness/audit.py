"""The API server's audit log, read back: who used which verb on what. So least privilege can be proved.

Policy: every request at level Metadata, once it is answered (a watch: once it has begun); nothing of bodies, no secrets.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "None", "users": ["system:apiserver"]},  # its talk with itself: most of the log, of no use
        {"level": "Metadata"},
    ],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One request, as a rule of RBAC would allow it."""

    user: str
    verb: str
    group: str
    """API group; empty = the core group."""
    resource: str
    """With the subresource: `pods/log`; a path where it is no resource: `/readyz`."""
    namespace: str = ""
    name: str = ""
    code: int = 0
    """HTTP status of the answer."""
    is_dry_run: bool = False
    at: str = ""
    """RFC 3339, UTC, when it was received."""


def uses(log: Path, *, user: str | None = None) -> Iterator[Use]:
    """Every request of the log that was answered, or, a watch, begun; of `user` alone where given."""
    begun: set[str] = set()
    with log.open(encoding="utf-8") as file:
        for line in file:
            if not line.endswith("\n"):
                return  # is being written
            event = json.loads(line)
            if event["auditID"] in begun or user not in (None, _user(event)):
                continue
            if event["stage"] == "ResponseStarted":
                begun.add(event["auditID"])
            yield _use(event)


def _use(event: dict[str, Any]) -> Use:
    target = event.get("objectRef", {})
    parts = [target.get("resource", ""), target.get("subresource", "")]
    return Use(
        user=_user(event),
        verb=event["verb"],
        group=target.get("apiGroup", ""),
        resource="/".join(part for part in parts if part) or event["requestURI"].split("?")[0],
        namespace=target.get("namespace", ""),
        name=target.get("name", ""),
        code=event.get("responseStatus", {}).get("code", 0),
        is_dry_run="dryRun=All" in event["requestURI"],
        at=event["requestReceivedTimestamp"],
    )


def _user(event: Mapping[str, Any]) -> str:
    """ "" for a caller whom the server could not tell, as while it starts."""
    return str(event["user"].get("username", ""))
