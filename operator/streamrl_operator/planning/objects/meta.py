"""What every object of a job has: name, labels, owner, and the hash of what we apply."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from streamrl import API_VERSION, names
from streamrl.spec import RLJob
from streamrl.status import Images
from streamrl_operator.planning.values import Settings, Wanted

Built = dict[str, Any]
"""A Kubernetes object, or a part of one, as it is applied."""

_APPLICATION = "streamrl"
_HASH_CHARACTERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the builders build from."""

    job: RLJob
    namespace: str
    uid: str
    wanted: Wanted
    settings: Settings
    resolved: Mapping[str, str] = field(default_factory=dict)
    """Files of the ConfigMap with the job as they are now."""

    @property
    def images(self) -> Images:
        """Of pods that name none."""
        return self.wanted.images or self.settings.images

    @property
    def name(self) -> str:
        """Name of the job."""
        return self.job.metadata.name

    def labels(self, *, pool: str | None = None) -> dict[str, str]:
        """Labels of an object of the job."""
        labels = {
            names.LABEL_NAME: _APPLICATION,
            names.LABEL_INSTANCE: self.name,
            names.LABEL_MANAGED_BY: names.MANAGED_BY,
            names.LABEL_JOB: self.name,
            names.LABEL_JOB_UID: self.uid,
        }
        return labels if pool is None else labels | {names.LABEL_POOL: pool}

    def selector(self, *, role: str, pool: str | None = None) -> dict[str, str]:
        """Labels by which pods are found; they cannot change in the life of a StatefulSet."""
        labels = {names.LABEL_JOB: self.name, names.LABEL_ROLE: role}
        return labels if pool is None else labels | {names.LABEL_POOL: pool}

    def metadata(self, name: str, *, pool: str | None = None, owned: bool = True) -> Built:
        """Metadata of an object; without an owner it stays when the job is deleted."""
        metadata: Built = {"name": name, "namespace": self.namespace, "labels": self.labels(pool=pool)}
        return metadata | {"ownerReferences": [self._owner()]} if owned else metadata

    def _owner(self) -> Built:
        return {
            "apiVersion": API_VERSION,
            "kind": "RLJob",
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }


def canonical(value: object) -> str:
    """`value` as JSON, always the same for the same value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def stamp(built: Mapping[str, Any]) -> Built:
    """The object with the hash of all the rest of it."""
    assert not built["metadata"].get("annotations")  # ours is the only one
    digest = hashlib.sha256(canonical(built).encode()).hexdigest()[:_HASH_CHARACTERS]
    return dict(built) | {"metadata": built["metadata"] | {"annotations": {names.ANNOTATION_SPEC_HASH: digest}}}
