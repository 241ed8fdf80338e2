"""The CRD is structural, bounded, and of one opinion with the models."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from streamrl.changes import when
from streamrl.spec import parse_job
from streamrl.spec.pod import RLJobDefaultsSpec
from streamrl_cli.yaml_document import YamlError, read_documents
from streamrl_workers.plugins.kinds import KINDS
from support.structural import Schema, defaulted, faults, nodes
from support.tree import ROOT

CRD = YAML(typ="safe", pure=True).load(ROOT / "crds/streamrl.io_rljobs.yaml")
VERSION = CRD["spec"]["versions"][0]
JOB: Schema = VERSION["schema"]["openAPIV3Schema"]
NODES = dict(nodes(JOB))
OURS = {path: node for path, node in NODES.items() if path.startswith((".spec", ".status"))}
RULES = [(path, rule) for path, node in NODES.items() for rule in node.get("x-kubernetes-validations", [])]
GOOD = sorted((ROOT / "tests/corpus/good").glob("*.yaml"))
GOOD += sorted((ROOT / "examples").glob("*.yaml")) + sorted((ROOT / "examples/agents").glob("*.yaml"))
EXAMPLES = [
    path for path in sorted((ROOT / "examples").rglob("*.yaml")) if "\nkind: RL" in path.read_text(encoding="utf-8")
]
SCHEMAS = {
    crd["spec"]["names"]["kind"]: crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for crd in (YAML(typ="safe", pure=True).load(path) for path in (ROOT / "crds").glob("*.yaml"))
}
BAD = sorted((ROOT / "tests/corpus/bad").glob("*.yaml"))
RESERVED = [
    "true",
    "false",
    "null",
    "in",
    "as",
    "break",
    "const",
    "continue",
    "else",
    "for",
    "function",
    "if",
    "import",
    "let",
    "loop",
    "package",
    "namespace",
    "return",
    "void",
    "var",
    "while",
]
LONGEST_ANNOTATION_BYTES = 256 * 1024
"""Of all annotations of an object: `kubectl apply` keeps what it applied in one, as compact JSON."""


def documents(path: Path) -> list[Any]:
    return [document.data for document in read_documents(path.read_bytes().decode("utf-8", errors="replace"))]


def test_every_node_has_a_type_and_nothing_that_is_not_structural() -> None:
    allowed = {"type", "description", "default", "required", "properties", "items", "enum", "pattern", "format"}
    allowed |= {f"{side}{what}" for side in ("min", "max") for what in ("imum", "Length", "Items", "Properties")}
    allowed |= {"exclusiveMinimum", "exclusiveMaximum", "additionalProperties"}
    odd = {
        path: key
        for path, node in NODES.items()
        for key in node
        if key not in allowed and not key.startswith("x-kubernetes-")
    }
    assert odd == {}
    untyped = [node for node in NODES.values() if "type" not in node]
    assert [node for node in untyped if not node.get("x-kubernetes-int-or-string")] == []
    assert all(node["pattern"] and node["maxLength"] for node in untyped)


def test_everything_is_bounded() -> None:
    kinds = {"array": ("maxItems",), "string": ("maxLength", "enum"), "integer": ("minimum",)}
    maps = [node for node in OURS.values() if "additionalProperties" in node]
    assert maps
    assert [node for node in maps if "maxProperties" not in node] == []
    unbounded = [
        path
        for path, node in OURS.items()
        if (kind := node.get("type")) in kinds and not any(bound in node for bound in kinds[kind])
    ]
    assert unbounded == []
    free = [node for node in OURS.values() if node.get("x-kubernetes-preserve-unknown-fields")]
    assert [node for node in free if "maxProperties" not in node] == []
    of_pods = [path for path, node in OURS.items() if ".pod" in path and node in free]
    # Parameters of a data set, arguments of a chat template; the same in a mixture. Options of each kind of plug-in.
    assert len(free) - len(of_pods) == 4 + len(KINDS)


def test_everything_is_described() -> None:
    named = {path: node for path, node in OURS.items() if not (path.endswith(("[]", "{}")) or is_refused(node))}
    silent = [path for path, node in named.items() if not (node.get("description") or described_at(path))]
    assert silent == [], (
        "what a mixture's tasks have in common with `task`, and pods with the trainer's, is described there"
    )


def is_refused(node: Schema) -> bool:
    return "false" in [rule["rule"] for rule in node.get("x-kubernetes-validations", ())]


def described_at(path: str) -> str:
    """The text of the same field at the place where it is described."""
    of_trainer = re.sub(r"^\.spec\.(generators\[\]|task\.agent\.pool)\.pod", ".spec.trainer.pod", path)
    of_agents = path.replace(".task.agent.pool.", ".generators[].")
    places = (path.replace(".mixture[]", ""), of_trainer, of_agents)
    return next((text for place in places if (text := NODES.get(place, {}).get("description", ""))), "")


def test_lists_say_how_they_merge() -> None:
    kinds = {path: node["x-kubernetes-list-type"] for path, node in OURS.items() if node.get("type") == "array"}
    assert kinds[".spec.generators"] == kinds[".spec.task.rewards"] == kinds[".status.conditions"] == "map"
    for path in (path for path, kind in kinds.items() if kind == "map"):
        keys = OURS[path]["x-kubernetes-list-map-keys"]
        assert set(keys) <= set(OURS[path]["items"]["required"])


def test_rules_are_written_for_cel() -> None:
    assert len(RULES) > 15
    for path, rule in RULES:
        assert rule["rule"].count("(") == rule["rule"].count(")"), path
        assert "\n" not in rule["message"]
        assert not set(re.findall(r"self\.(\w+)", rule["rule"])) & set(RESERVED), path


def test_rules_name_fields_that_exist() -> None:
    for path, rule in RULES:
        names = {name for name in re.findall(r"self\.(\w+)", rule["rule"]) if name not in ("metadata", "all", "size")}
        assert names <= set(NODES[path].get("properties", ())), (path, rule)


def test_names_are_bounded() -> None:
    rules = " ".join(rule["rule"] for rule in JOB["x-kubernetes-validations"])
    assert "self.metadata.name.size() <= 36" in rules
    assert "self.metadata.name.size() + g.name.size() < 52" in rules
    assert OURS[".spec.generators[].name"]["maxLength"] == 50


def test_status_is_a_subresource_and_shown() -> None:
    assert VERSION["subresources"] == {"status": {}}
    assert [column["name"] for column in VERSION["additionalPrinterColumns"]] == [
        "State",
        "Step",
        "Steps",
        "Reward",
        "Queue",
        "Ready",
        "Reason",
        "Age",
    ]
    for column in VERSION["additionalPrinterColumns"]:
        path = column["jsonPath"].split("[")[0]
        assert path in NODES or path == ".metadata.creationTimestamp"


def test_it_stays_small() -> None:
    """Five sixths of what `kubectl apply` can keep, which is far less than what an API server can. A pod's fields are 26 KB, three times."""
    for path in (ROOT / "crds").glob("*.yaml"):
        whole = YAML(typ="safe", pure=True).load(path)
        assert len(json.dumps(whole, separators=(",", ":")).encode()) < LONGEST_ANNOTATION_BYTES * 5 // 6, path


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.name)
def test_good_files_pass_and_mean_the_same_with_an_api_servers_defaults(path: Path) -> None:
    for document in documents(path):
        whole = document | {"spec": defaulted(document["spec"], JOB["properties"]["spec"])}
        assert list(faults(whole["spec"], JOB["properties"]["spec"])) == []
        assert parse_job(whole) == parse_job(document)


def test_a_list_has_no_default_of_what_may_change_at_any_time() -> None:
    """A client-side merge would see a difference for ever; of what may not, a running job's file would be refused after an upgrade."""
    listed = [path.removeprefix(".spec.") for path, node in OURS.items() if "default" in node and "[]" in path]
    assert listed
    assert [path for path in listed if when(path) == "Always"] == []


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_lists_of_examples_say_all_that_an_api_server_would_add(path: Path) -> None:
    """A client-side merge of them is empty."""
    for document in documents(path):
        if (kind := SCHEMAS.get(document["kind"])) is not None:
            assert added(document["spec"], defaulted(document["spec"], kind["properties"]["spec"])) == []


def added(given: Any, stored: Any, path: str = "spec") -> list[str]:
    """Fields in items of lists that are stored and were not given."""
    if isinstance(given, list):
        return [
            field for before, after in zip(given, stored, strict=True) for field in added(before, after, f"{path}[]")
        ]
    if not isinstance(given, dict):
        return []
    new = [f"{path}.{name}" for name in stored.keys() - given.keys() if "[]" in path]
    return new + [field for name, value in given.items() for field in added(value, stored[name], f"{path}.{name}")]


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.name)
def test_bad_files_fail_by_the_schema_or_by_a_rule(path: Path) -> None:
    raw = path.read_bytes().decode("utf-8", errors="replace")
    try:
        specs = [
            document.get("spec")
            for document in documents(path)
            if isinstance(document, dict) and document.get("kind") == "RLJob"
        ]
    except YamlError:
        return  # kubectl cannot read it either
    by_schema = any(
        list(faults(defaulted(spec, JOB["properties"]["spec"]), JOB["properties"]["spec"])) for spec in specs
    )
    if "# spec-only: OK" in raw:
        assert not by_schema
    elif specs and not by_schema:
        assert any(rule["message"] in raw for _, rule in RULES) or re.search(
            r": (apiVersion|metadata\.name|\(document\)|must be UTF-8|an amount that is counted)", raw
        )


def test_the_chart_takes_every_field_of_the_defaults() -> None:
    values = json.loads((ROOT / "helm/streamrl/values.schema.json").read_text())
    known = RLJobDefaultsSpec.model_json_schema(by_alias=True)["properties"]
    assert set(values["properties"]["jobDefaults"]["propertyNames"]["enum"]) == set(known)
