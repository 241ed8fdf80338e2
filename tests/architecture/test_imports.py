"""Imports go one way; the contract is light; what must start fast does."""

import ast
import json
import sys
import tomllib

import pytest

from support.tree import PACKAGES, ROOT, calls, place, python, sources, syntax

CONTRACT_NEEDS = {"annotated_types", "google", "pydantic", "pydantic_core", "typing_extensions", "typing_inspection"}
BASE_NEEDS = {"ruamel"}
HEAVY = {"torch", "transformers", "numpy", "tokenizers", "reasoning_gym"}

LOADS = {"from_pretrained", "from_config"}

MOST_MODULES = 700
"""What a start may import: the scheduler imports 609, torch alone 1,200."""
MOST_KIB = 80 * 1000
MEASURE = """
import json, sys, importlib
importlib.import_module(sys.argv[1])
peak_kib = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))  # ru_maxrss is the parent's, too
print(json.dumps({"peak_kib": peak_kib, "count": len(sys.modules), "modules": sorted({name.split(".")[0] for name in sys.modules})}))
"""


LINT = """
import sys
from importlinter.cli import lint_imports
sys.exit(lint_imports(config_filename=sys.argv[1], no_cache=True))
"""


def test_imports_go_one_way() -> None:
    python(LINT, str(ROOT / ".importlinter"))  # in a process of its own: it silences every logger of the one it runs in


def test_models_are_loaded_by_one_door_that_runs_no_code_of_theirs() -> None:
    door = ROOT / "workers/streamrl_workers/models/load.py"
    auto = {
        place(path, node.lineno): alias.name
        for path in sources(*PACKAGES)
        for node in ast.walk(syntax(path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers")
        for alias in node.names
        if alias.name.startswith("Auto") and path != door
    }
    assert auto == {}
    loads = [call for name, call in calls(door) if name in LOADS]
    given = [ast.unparse(call).rpartition("**")[2].rstrip(")") for call in loads]
    assert sorted(given) == ["_SAFE"] * 3 + ["_WEIGHTS"] * 2


def loaded_by(module: str) -> set[str]:
    """Top-level modules that are there after `module` is imported, without the standard library and ours."""
    modules: set[str] = set(json.loads(python(MEASURE, module))["modules"])
    without = json.loads(python(MEASURE, "json"))["modules"]  # what an editable installation itself loads
    return {name for name in modules - set(without) - sys.stdlib_module_names if not name.startswith(("streamrl", "_"))}


@pytest.mark.parametrize("module", ["streamrl.spec", "streamrl.proto.stream_pb2", "streamrl.status", "streamrl.keys"])
def test_contract_loads_pydantic_and_protobuf_alone(module: str) -> None:
    assert loaded_by(module) <= CONTRACT_NEEDS


@pytest.mark.parametrize("module", ["streamrl_cli.main", "streamrl_cli.validate", "streamrl_cli.explain"])
def test_validate_and_explain_load_no_more_than_a_yaml_reader(module: str) -> None:
    assert loaded_by(module) <= CONTRACT_NEEDS | BASE_NEEDS


def test_contract_needs_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {requirement.split(">")[0].split(".")[0] for requirement in project["dependencies"]}
    assert {"pydantic", "protobuf", "ruamel"} <= declared
    assert not declared & {"torch", "transformers", "grpcio", "kopf"}


@pytest.mark.parametrize("module", ["streamrl_workers.scheduler.main", "streamrl_cli.run"])
def test_scheduler_and_runner_start_light(module: str) -> None:
    start = json.loads(python(MEASURE, module))
    assert not HEAVY & set(start["modules"])
    assert start["count"] < MOST_MODULES
    assert start["peak_kib"] < MOST_KIB
