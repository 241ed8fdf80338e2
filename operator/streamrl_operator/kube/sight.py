"""Which namespaces are known whole: only there are jobs looked at, since half of what a job has looks like a job that lacks the rest.

Owns: of each namespace the kinds that are not known, and whether the API server refuses to show it. Does not own: who lists, and when
again (`reflector.py`, `jobs.py`).
Each namespace is by itself: one whose Role is gone, or that is gone with it, is told of once and left alone until all of it can be
listed; the others go on. Where all namespaces are one ("", by a ClusterRole) nothing can be done without it: there a refusal is an error
like any other, and what was known stays in use.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from streamrl_operator.kube.errors import ForbiddenError, KubeError, NotFoundError
from streamrl_operator.kube.kinds import Kind

log = logging.getLogger(__name__)

LONGEST_PAUSE_S = 30.0
"""Between two attempts to list what is refused: a dozen kinds ask, for as long as the namespace is on the list."""


@dataclass(slots=True)
class Sight:
    """What is known of the namespaces that the operator watches."""

    namespaces: tuple[str, ...]
    """("",) = all, as one."""
    kinds: Iterable[Kind]
    """A namespace is whole when all of these are listed."""
    changed: Callable[[str, bool], None] = lambda *_: None
    """Told of a namespace that has become whole, or (False) is refused."""
    _missing: dict[str, set[str]] = field(init=False)
    _refused: dict[str, str] = field(default_factory=dict)
    """Namespace -> the first refusal, until it is whole again."""

    def __post_init__(self) -> None:
        self._missing = {namespace: {kind.plural for kind in self.kinds} for namespace in self.namespaces}

    def listed(self, namespace: str, kind: Kind) -> None:
        """All of the kind is known there."""
        missing = self._missing[namespace]
        if kind.plural not in missing:
            return
        missing.discard(kind.plural)
        if not missing:
            self._refused.pop(namespace, None)
            log.info("namespace is known", extra={"namespace": namespace or "all"})
            self.changed(namespace, self.is_whole(namespace))

    def is_refused(self, namespace: str, kind: Kind, error: KubeError) -> bool:
        """Whether the error says that the kind cannot be seen there; then nothing there is looked at before it can be."""
        if not namespace or not isinstance(error, ForbiddenError | NotFoundError):
            return False
        self._missing[namespace].add(kind.plural)
        if namespace not in self._refused:
            self._refused[namespace] = str(error)
            fix = "restore its Role and RoleBinding, or take it out of watchNamespaces"
            log.warning("namespace is left alone", extra={"namespace": namespace, "error": str(error), "fix": fix})
            self.changed(namespace, self.is_whole(namespace))
        return True

    def is_whole(self, namespace: str) -> bool:
        """Whether all is known of what is there."""
        return not self._missing.get(namespace, self._missing.get("", ()))

    def unready(self) -> str:
        """Why the work cannot be done, empty if it can: a list is waited for, or there is no namespace that may be seen."""
        unlisted = [missing for namespace, missing in self._missing.items() if namespace not in self._refused]
        if awaited := set[str]().union(*unlisted):
            return f"waits for the first list of {', '.join(sorted(awaited))}"
        return "" if unlisted else f"no namespace may be seen: {next(iter(self._refused.values()))}"
