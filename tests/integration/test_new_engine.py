"""A new engine is its own file, a line in the registry, and its spec: validated, planned and run, with nothing else changed."""

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from subprocess import run
from typing import Any

import pytest

from streamrl_workers.metrics.jsonl import read_jsonl
from support.jobs import simulated_job, write_prompts
from support.runs import streamrl
from support.tree import ROOT

SPEC = '''class ToyEngineSpec(GeneratorEngineSpec):
    """Answers each prompt with itself."""

    needs_model = False
    pauses = False
    side_path = True
    alone_with: ClassVar[Mapping[str, bool | int]] = {"slots": 1}

    slots: int = Field(default=4, ge=1, le=64, description="Prompts at once.")


class GeneratorEngine('''
MEMBER = '''"""What generates."""

    toy: ToyEngineSpec | None = Field(default=None, description="An echo.")'''
ENGINE = '''"""The engine `toy`."""

from streamrl.spec.generators import SimulatedEngineSpec
from streamrl_workers.generator.engines.base import Engine, EngineOptions
from streamrl_workers.generator.engines.simulated import SimulatedEngine


def create(options: EngineOptions) -> Engine:
    """By the parts of another engine, which knows its prompts' answers."""
    spec = SimulatedEngineSpec(correctPercent=100, timeScale=0.0, meanTokens=4.0, sigma=0.0)
    return SimulatedEngine(spec=spec, slots=options.spec.slots, seed=options.seed)
'''
REGISTRY = '''def create_toy(options: EngineOptions) -> Engine:
    """An echo."""
    from streamrl_workers.generator.engines.toy import create

    return create(options)


ENGINES: dict[str, EngineKind] = {
    "toy": EngineKind(create=create_toy),'''


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of contract and workers that has the engine."""
    copy = tmp_path_factory.mktemp("product")
    for package in ("crds/streamrl", "workers/streamrl_workers"):
        shutil.copytree(ROOT / package, copy / Path(package).name)
    replace(copy / "streamrl/spec/generators.py", {"class GeneratorEngine(": SPEC, '"""What generates."""': MEMBER})
    engines = copy / "streamrl_workers/generator/engines"
    replace(engines / "__init__.py", {"ENGINES: dict[str, EngineKind] = {": REGISTRY})
    (engines / "toy.py").write_text(ENGINE)
    return copy


def replace(file: Path, changes: Mapping[str, str]) -> None:
    """Each text is in the file once."""
    text = file.read_text()
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    file.write_text(text)


@pytest.fixture
def folder(product: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """For jobs, with commands that know the engine."""
    monkeypatch.setenv("PYTHONPATH", str(product))
    write_prompts(tmp_path / "prompts.jsonl")
    return tmp_path


def toy_job(folder: Path, **changes: Any) -> str:
    """The file of a job whose generators are of the engine."""
    job = simulated_job(steps=3, replicas=1)
    job["spec"]["generators"][0]["engine"] = {"toy": {}}
    job["spec"]["generators"][0] |= changes
    file = folder / "job.yaml"
    file.write_text(json.dumps(job))
    return str(file)


def test_a_new_engine_is_planned_and_runs(folder: Path) -> None:
    planned = streamrl("plan", toy_job(folder))
    assert planned.returncode == 0, planned.stderr
    ran = streamrl("run", "--plain", toy_job(folder), "--run-dir", str(folder / "run"))
    assert ran.returncode == 0, ran.stderr
    steps = list(read_jsonl(folder / "run/metrics/steps.jsonl"))
    assert [step["reward_mean"] for step in steps] == [1.0, 1.0, 1.0]


def test_a_rule_refuses_a_new_engine_by_what_it_declares(folder: Path) -> None:
    refused = streamrl("validate", toy_job(folder, devices="Trainer"))
    assert refused.returncode == 2
    rule = "devices Trainer needs engine hf or simulated: toy or vllm does not stop between two steps, got toy"
    assert rule in refused.stderr


def test_the_rules_of_the_custom_resource_know_a_new_engine(folder: Path) -> None:
    schema = "from streamrl.spec.rljob import RLJob; print(RLJob.model_json_schema())"
    made = run([sys.executable, "-c", schema], check=True, cwd=folder, capture_output=True, text=True).stdout
    for rule in (
        "!(has(self.engine.toy) || has(self.engine.vllm))",
        "(has(g.engine.toy) || has(g.engine.simulated)) == has(self.trainer.engine.simulated)",
        "!has(self.trainer.sherl) || self.generators.all(g, (has(g.engine.toy) || has(g.engine.hf)))",
        "(has(g.engine.toy) && (g.engine.toy.slots == 1))",
    ):
        assert rule in made
