"""What we read of CEL has the same values at a real API server."""

from cluster.harness.base import Cluster
from cluster.harness.processes import wait_until
from support.cel_cases import CASES, DOCUMENT, SCHEMA

GROUP = "cel.example"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
SHEETS = f"/apis/{GROUP}/v1/sheets"


def test_expressions_have_the_same_values(control_plane: Cluster) -> None:
    rules = [{"rule": f"({text}) == {str(value).lower()}", "message": text} for text, value in CASES.items()]
    schema = {"type": "object", "properties": {"spec": SCHEMA | {"x-kubernetes-validations": rules}}}
    names = {"kind": "Sheet", "listKind": "SheetList", "plural": "sheets", "singular": "sheet"}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    crd = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"sheets.{GROUP}"},
        "spec": {"group": GROUP, "scope": "Cluster", "names": names, "versions": [version]},
    }
    control_plane.api.create(CRDS, crd).expect()
    try:
        wait_until(lambda: control_plane.api.get(SHEETS).ok, what="sheets are served", deadline_s=60)
        sheet = {"apiVersion": f"{GROUP}/v1", "kind": "Sheet", "metadata": {"name": "s"}, "spec": DOCUMENT}
        control_plane.api.create(SHEETS, sheet, dryRun="All").expect()
        broken = sheet | {"spec": DOCUMENT | {"n": 4}}
        assert "self.n == 3" in control_plane.api.create(SHEETS, broken, dryRun="All").message
    finally:
        control_plane.api.delete(f"{CRDS}/sheets.{GROUP}").expect()
