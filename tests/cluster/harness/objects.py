"""The harness's loops and waits over objects as plain dicts, and a wake-up when something changed. Speaks through `api.Api`."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.harness.api import Api

Object = dict[str, Any]
PLURALS = {
    "Pod": "pods",
    "Namespace": "namespaces",
    "Service": "services",
    "ServiceAccount": "serviceaccounts",
    "ConfigMap": "configmaps",
    "Secret": "secrets",
    "PersistentVolume": "persistentvolumes",
    "PersistentVolumeClaim": "persistentvolumeclaims",
    "NetworkPolicy": "networkpolicies",
    "StorageClass": "storageclasses",
    "RuntimeClass": "runtimeclasses",
    "ClusterRole": "clusterroles",
    "ClusterRoleBinding": "clusterrolebindings",
    "Deployment": "deployments",
    "StatefulSet": "statefulsets",
}
FIELD_MANAGER = "streamrl-test-harness"
NOT_FOUND = 404
WATCH_S = 300
RETRY_S = 0.2


class Objects:
    """The objects of one API server: what is not there is None, what is refused raises."""

    def __init__(self, kubeconfig: Path) -> None:
        self.api = Api(kubeconfig)

    def close(self) -> None:
        self.api.close()

    def list(self, path: str) -> list[Object]:
        """Objects at a path like `/api/v1/pods`."""
        items: list[Object] = self.api.get(path).expect()["items"]
        return items

    def get(self, path: str) -> Object | None:
        """One object; None where there is none."""
        answer = self.api.get(path)
        return None if answer.code == NOT_FOUND else answer.expect()

    def apply(self, body: Object) -> Object:
        """Server-side apply, as the owner of what it names."""
        metadata = body["metadata"]
        path = f"{collection(body['apiVersion'], body['kind'], metadata.get('namespace'))}/{metadata['name']}"
        return self.api.patch(path, body, kind="apply", fieldManager=FIELD_MANAGER, force="true").expect()

    def delete(self, path: str) -> None:
        """Delete one object, if it is there."""
        answer = self.api.delete(path)
        if answer.code != NOT_FOUND:
            answer.expect()


def collection(api_version: str, kind: str, namespace: str | None) -> str:
    """Path of the objects of a kind."""
    root = f"/api/{api_version}" if "/" not in api_version else f"/apis/{api_version}"
    return f"{root}/{f'namespaces/{namespace}/' if namespace else ''}{PLURALS[kind]}"


class Watcher:
    """Sets an event when anything at the paths changes: a level-triggered loop then looks at all of it again."""

    def __init__(self, kubeconfig: Path, paths: Sequence[str]) -> None:
        self.changed = threading.Event()
        self.changed.set()
        self._over = threading.Event()
        self._apis = [Api(kubeconfig) for _ in paths]
        for api, path in zip(self._apis, paths, strict=True):
            threading.Thread(target=self._watch, args=(api, path), name=f"watch {path}", daemon=True).start()

    def _watch(self, api: Api, path: str) -> None:
        """Watch for ever: without a resource version every watch begins with all there is, so nothing is missed."""
        while not self._over.is_set():
            try:
                for _ in api.watch(path, timeout_s=WATCH_S):
                    self.changed.set()
            except Exception:  # noqa: BLE001 - the API server is being restarted, or our client is closed under us
                self._over.wait(RETRY_S)

    def close(self) -> None:
        self._over.set()
        self.changed.set()
        for api in self._apis:
            api.close()
