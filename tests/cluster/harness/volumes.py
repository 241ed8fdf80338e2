"""Volumes without a provisioner: every claim of the default class gets a directory of the harness as a hostPath volume.

Owns the directories. The kubelet does not change owners of hostPath volumes (fsGroup does nothing there), so they are open
to every user; a claim's data go with the claim (Delete) or stay (Retain), as the volume says.
"""

import shutil
from pathlib import Path

from cluster.harness.manifests import PROVISIONER, STORAGE_CLASS
from cluster.harness.objects import Object, Objects

WATCHED = ("/api/v1/persistentvolumeclaims", "/api/v1/persistentvolumes")
PROVISIONED_BY = "pv.kubernetes.io/provisioned-by"


class Provisioner:
    """Makes and removes volumes below one folder; `step` is called whenever claims or volumes changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def step(self, api: Objects) -> None:
        """Give every waiting claim a volume, and take back the volumes whose claims are gone."""
        for claim in api.list(WATCHED[0]):
            if _waits(claim):
                api.apply(self._volume(claim))
        for volume in api.list(WATCHED[1]):
            path = Path(volume["spec"].get("hostPath", {}).get("path", "/"))
            if _is_over(volume) and path.is_relative_to(self.folder):
                shutil.rmtree(path, ignore_errors=True)
                api.delete(f"/api/v1/persistentvolumes/{volume['metadata']['name']}")

    def _volume(self, claim: Object) -> Object:
        metadata = claim["metadata"]
        path = self.folder / f"{metadata['namespace']}-{metadata['name']}-{metadata['uid'][:8]}"
        path.mkdir(exist_ok=True)
        path.chmod(0o777)
        reference = {"apiVersion": "v1", "kind": "PersistentVolumeClaim"}
        reference |= {key: metadata[key] for key in ("namespace", "name", "uid")}
        return {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"pvc-{metadata['uid']}", "annotations": {PROVISIONED_BY: PROVISIONER}},
            "spec": {
                "capacity": {"storage": claim["spec"]["resources"]["requests"]["storage"]},
                "accessModes": claim["spec"]["accessModes"],
                "persistentVolumeReclaimPolicy": "Delete",
                "storageClassName": STORAGE_CLASS,
                "volumeMode": "Filesystem",
                "claimRef": reference,
                "hostPath": {"path": str(path), "type": "Directory"},
            },
        }


def _waits(claim: Object) -> bool:
    return bool(
        claim.get("status", {}).get("phase") == "Pending"
        and claim["spec"].get("storageClassName") == STORAGE_CLASS
        and not claim["spec"].get("volumeName")
        and "deletionTimestamp" not in claim["metadata"]
    )


def _is_over(volume: Object) -> bool:
    return bool(
        volume["metadata"].get("annotations", {}).get(PROVISIONED_BY) == PROVISIONER
        and volume.get("status", {}).get("phase") == "Released"
        and volume["spec"]["persistentVolumeReclaimPolicy"] == "Delete"
    )


def path_of_claim(api: Objects, namespace: str, name: str) -> Path:
    """Where the data of a claim lie on this machine."""
    claim = api.get(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/{name}")
    if claim is None or not claim["spec"].get("volumeName"):
        raise LookupError(f"claim {namespace}/{name} has no volume")
    volume = api.get(f"/api/v1/persistentvolumes/{claim['spec']['volumeName']}")
    assert volume is not None
    return Path(volume["spec"]["hostPath"]["path"])


def fixed_volume(name: str, path: Path, *, namespace: str, claim: str) -> list[Object]:
    """A directory of this machine as a read-only volume, with the one claim that it is for."""
    common = {"accessModes": ["ReadOnlyMany"], "storageClassName": "", "volumeMode": "Filesystem"}
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name},
            "spec": {
                **common,
                "capacity": {"storage": "1Gi"},
                "persistentVolumeReclaimPolicy": "Retain",
                "claimRef": {
                    "apiVersion": "v1",
                    "kind": "PersistentVolumeClaim",
                    "namespace": namespace,
                    "name": claim,
                },
                "hostPath": {"path": str(path), "type": "Directory"},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": claim, "namespace": namespace},
            "spec": {**common, "volumeName": name, "resources": {"requests": {"storage": "1Gi"}}},
        },
    ]
