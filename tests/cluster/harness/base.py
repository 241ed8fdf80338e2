"""What every cluster offers to tests, ours or one that was given by STREAMRL_TEST_KUBECONFIG."""

import json
import os
import subprocess
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from cluster.harness import kubeconfigs, tools
from cluster.harness.api import Api
from cluster.harness.audit import Use
from cluster.harness.processes import ClusterError, wait_until

GIVEN = "STREAMRL_TEST_KUBECONFIG"
CRDS = Path(__file__).parents[3] / "crds"
ESTABLISHED_S = 120.0
KUBECTL_S = 120.0


class Cluster:
    """A cluster that a test may use as its administrator."""

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        self.kubeconfig = kubeconfig
        """Of an administrator."""
        self.folder = folder
        """For files of this cluster; removed with it."""

    @cached_property
    def api(self) -> Api:
        """Plain HTTP as the administrator."""
        return Api(self.kubeconfig)

    def kubectl(
        self,
        *arguments: str,
        stdin: str | None = None,
        check: bool = True,
        kubeconfig: Path | None = None,
        deadline_s: float = KUBECTL_S,
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl, as the administrator or by another kubeconfig."""
        command = [str(tools.tool("kubectl")), "--kubeconfig", str(kubeconfig or self.kubeconfig), *arguments]
        done = subprocess.run(
            command,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
            env=os.environ | {"KUBECACHEDIR": str(self.folder / "kubectl")},
        )
        if check and done.returncode:
            raise ClusterError(f"kubectl {' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip()}")
        return done

    def get(self, *arguments: str) -> Any:
        """Run `kubectl get ... -o json`."""
        return json.loads(self.kubectl("get", *arguments, "-o", "json").stdout)

    def apply_crds(self) -> None:
        """Apply `crds/*.yaml` and wait until they are established."""
        yaml = YAML(typ="safe", pure=True)
        paths = []
        for file in sorted(CRDS.glob("*.yaml")):
            body = yaml.load(file.read_text())
            path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{body['metadata']['name']}"
            self.api.patch(path, body, kind="apply", fieldManager="streamrl-tests", force="true").expect()
            paths.append(path)
        for path in paths:
            wait_until(partial(self._established, path), what=f"{path} Established", deadline_s=ESTABLISHED_S)

    def _established(self, path: str) -> bool:
        body = self.api.get(path).expect()
        found = {one["type"]: one["status"] for one in body.get("status", {}).get("conditions") or []}
        # Established alone is stale after a change of the schema; the API server serves it a moment later than it says.
        return found.get("Established") == "True" and self.api.get(self._served(body)).ok

    @staticmethod
    def _served(definition: Mapping[str, Any]) -> str:
        spec = definition["spec"]
        return f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"

    def kubeconfig_of_account(self, namespace: str, name: str) -> Path:
        """Write a kubeconfig that acts as a service account, by a token of a day."""
        token = self.kubectl("create", "token", name, "--namespace", namespace, "--duration", "24h").stdout.strip()
        return self._write(f"account-{namespace}-{name}", kubeconfigs.by_token(token))

    def kubeconfig_for(self, user: str, groups: tuple[str, ...] = ()) -> Path:
        """Write a kubeconfig for a user by certificate."""
        raise ClusterError(f"a user by certificate ({user}, {groups}) needs our own control plane; unset {GIVEN}")

    def uses(self, user: str | None = None) -> list[Use]:
        """Return the requests of the audit log."""
        raise ClusterError(f"the audit log (of {user or 'all'}) needs our own control plane; unset {GIVEN}")

    def _write(self, name: str, user: kubeconfigs.User) -> Path:
        original = YAML(typ="safe", pure=True).load(self.kubeconfig.read_text())
        return kubeconfigs.derive(self.folder / "kubeconfigs" / f"{name}.json", original, user)

    def close(self) -> None:
        """Let go of it."""
        if "api" in self.__dict__:
            self.api.close()
