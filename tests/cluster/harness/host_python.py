"""This machine's Python and sources in pods, read-only and at their own paths: test images need no torch.

Two ways. `runtimeClassName: host-python` gives them to every container of a pod. `volumes` makes claims that a job's
`pod.volumes` can name; those reach the main container alone.
"""

import sys
from pathlib import Path
from typing import Any

from cluster.harness import volumes
from cluster.harness.objects import Objects
from cluster.harness.tools import ToolError

REPOSITORY = Path(__file__).parents[3]
HIDDEN = Path("/tmp")
"""Pods have one of their own: what this machine has there cannot be seen in them."""
SYSTEM = Path("/usr")
"""What lies there is in the image already."""


def paths() -> tuple[Path, ...]:
    """Directories that a worker needs: the sources, the virtual environment, the interpreter. None lies in another."""
    needed = [REPOSITORY, Path(sys.prefix), Path(sys.base_prefix)]
    outside = sorted({path.resolve() for path in needed if not path.is_relative_to(SYSTEM)})
    if hidden := [path for path in outside if path.is_relative_to(HIDDEN)]:
        raise ToolError(
            f"{hidden[0]} lies in {HIDDEN}, which pods replace by their own: use a checkout in another folder"
        )
    return tuple(path for path in outside if not any(path != one and path.is_relative_to(one) for one in outside))


def search_path() -> str:
    """PATH on which `python` is the virtual environment's."""
    return f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin"


def worker_volume(
    api: Objects, namespace: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """Make the claims in a namespace; returns `pod.volumes`, `pod.volumeMounts`, `pod.env` as an RLJob has them."""
    entries, mounts = [], []
    for number, path in enumerate(paths()):
        name = f"host-python-{number}"
        volume = f"{name}-{namespace}"
        _forget_if_released(api, volume)
        for body in volumes.fixed_volume(volume, path, namespace=namespace, claim=name):
            api.apply(body)
        entries.append({"name": name, "persistentVolumeClaim": {"claimName": name, "readOnly": True}})
        mounts.append({"name": name, "mountPath": str(path), "readOnly": True})
    env = [{"name": "PATH", "value": search_path()}, {"name": "PYTHONDONTWRITEBYTECODE", "value": "1"}]
    return entries, mounts, env


def _forget_if_released(api: Objects, volume: str) -> None:
    """A volume whose claim went with its namespace is bound to no other again."""
    path = f"/api/v1/persistentvolumes/{volume}"
    found = api.get(path)
    if found is not None and found.get("status", {}).get("phase") == "Released":
        api.delete(path)
