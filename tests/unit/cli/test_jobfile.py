"""Reading of job files: sizes, encodings, JSON, `--set`."""

import json
from pathlib import Path

import pytest

from streamrl.errors import UserError, UserErrors
from streamrl_cli.jobfile import MAX_FILE_BYTES, load_job
from support.tree import ROOT

MINIMAL = ROOT / "tests/corpus/good/minimal.yaml"
EVERYTHING = ROOT / "tests/corpus/good/everything.yaml"


def mistake(path: Path, *overrides: str) -> str:
    with pytest.raises((UserError, UserErrors)) as caught:
        load_job(path, overrides=overrides)
    return str(caught.value)


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_numbers_are_those_of_yaml_1_2() -> None:
    job = load_job(EVERYTHING)
    assert job.spec.model.scratch is not None
    assert job.spec.model.scratch.warm_up.learning_rate == 1e-3
    assert job.spec.trainer.learning_rate == 3e-4


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    assert load_job(written(tmp_path / "job.yaml", b"\xef\xbb\xbf" + MINIMAL.read_bytes())).metadata.name == "minimal"


@pytest.mark.parametrize(
    ("name", "data", "text"),
    [
        ("big.yaml", b"#" * (MAX_FILE_BYTES + 1), "must be at most 1048576 bytes; check that it is a job file"),
        ("empty.yaml", b"", "holds no document"),
        ("latin.yaml", b"a: 1\nb: \xe9\n", ":2: must be UTF-8; save it as UTF-8"),
        ("null.yaml", b"a: 1\nb: \x00\n", ":2: is not YAML"),
        ("syntax.json", b'{\n"kind" 1}', ":2: is not JSON: Expecting ':' delimiter"),
        ("deep.json", b"[" * 100_000, ": is not JSON: it is nested too deep"),
        ("digits.json", b'{"a": ' + b"9" * 5000 + b"}", ": is not JSON: Exceeds the limit (4300 digits)"),
        ("surrogate.yaml", b'a: 1\nb: "\\ud800"', ":2: must be UTF-8, which cannot carry half of a surrogate pair"),
        ("controls.yaml", b'"a\\e[2J\\u202e": 1', ":1: a\\x1b[2J\\u202e: is not a known field"),
        ("deep.yaml", b"[" * 100_000, ":1: is nested more than 64 deep"),
        ("digits.yaml", b"a: " + b"9" * 10_000, "must be a mapping"),
        ("key.yaml", b"[1, 2]: 3", ":1: a key must be a string; quote it"),
        ("recursive.yaml", b"a: &a [*a]", ":1: alias *a has no anchor before it"),
        ("merge.yaml", b"<<: 3", ":1: `<<` must merge mappings"),
    ],
)
def test_what_is_no_job_file_is_one_line(name: str, data: bytes, text: str, tmp_path: Path) -> None:
    said = mistake(written(tmp_path / name, data))
    assert text in said or name == "digits.yaml"
    assert all(line.startswith(str(tmp_path / name)) for line in said.splitlines())


def test_a_directory_is_no_job_file(tmp_path: Path) -> None:
    assert mistake(tmp_path) == f"{tmp_path}: must be a regular file; check the path"


def test_two_jobs_cannot_be_run_at_once() -> None:
    assert "must hold one job, holds 2" in mistake(ROOT / "tests/corpus/good/two-jobs.yaml")


def test_json_mistakes_have_lines(tmp_path: Path) -> None:
    data = json.loads((ROOT / "tests/corpus/good/tabs.json").read_bytes())
    data["spec"]["pipeline"]["steps"] = 0
    path = written(tmp_path / "job.json", json.dumps(data, indent=1).encode())
    line = next(number for number, text in enumerate(path.read_text().splitlines(), start=1) if '"steps"' in text)
    assert mistake(path).startswith(f"{path}:{line}: spec.pipeline.steps: must be a whole number")


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("spec.pipeline.steps=20", "pipeline.steps", 20),
        ("spec.trainer.learningRate=1e-5", "trainer.learning_rate", 1e-5),
        ("spec.task.sampling.stop=[a, 'b=c']", "task.sampling.stop", ("a", "b=c")),
        ("spec.algorithm={grpo: {clipLow: 0.1}}", "algorithm.grpo.clip_low", 0.1),
        ("spec.generators[0].engine.hf.slots=3", "generators.0.engine.hf.slots", 3),
        ("spec.generators.0.engine.hf.slots=3", "generators.0.engine.hf.slots", 3),
        ("spec.task.dataset.reasoningGym.parameters.min_terms=3", "task.dataset.reasoning_gym.parameters.min_terms", 3),
        ("spec.scheduling.maxBufferBytes=1Gi", "scheduling.max_buffer_bytes", "1Gi"),
        ("spec.trainer.schedule=Cosine", "trainer.schedule", "Cosine"),
        ("spec.task.evaluation=null", "task.evaluation.max_prompts", 128),
    ],
)
def test_set_changes_one_field(override: str, path: str, value: object) -> None:
    found: object = load_job(MINIMAL, overrides=[override]).spec
    for part in path.split("."):
        if isinstance(found, tuple | dict):
            found = found[int(part) if part.isdigit() else part]  # type: ignore[call-overload]
        else:
            found = getattr(found, part)
    assert found == value


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("spec.pipeline.steps", "--set: must be path=value, got 'spec.pipeline.steps'"),
        ("=3", "--set: must be path=value"),
        ("spec..steps=3", "--set: must be path=value"),
        ("spec.pipeline.step=3", "--set spec.pipeline.step: is not a known field; did you mean steps?"),
        ("spec.trainer.pod.hostPID=true", "--set spec.trainer.pod.hostPID: is refused: a pod must not see"),
        ("spec.pipline.steps=3", "--set spec.pipline: is not a known field; did you mean pipeline?"),
        (
            "spec.pipeline.steps=many",
            "--set spec.pipeline.steps: must be a whole number from 1 to 10000000, got 'many'",
        ),
        (
            "spec.generators[4].name=x",
            "--set spec.generators[4]: must be an item of the file's list, which has 1, got 4",
        ),
        ("spec.generators.name=x", "--set spec.generators.name: is a field of a list's items; give the item's index"),
        ("spec.pipeline[0]=x", "--set spec.pipeline[0]: has an index, but the file has no list there"),
        ("spec.pipeline.steps={", "is not YAML"),
        (
            "spec.model.path.directory=here",
            "spec.model: needs exactly one of huggingFace, path, scratch; got path, scratch",
        ),
        ("spec.pipeline.steps=null", "spec.pipeline.steps: is required"),
    ],
)
def test_a_bad_set_is_one_line(override: str, text: str) -> None:
    said = mistake(MINIMAL, override)
    assert text in said
    assert "\n" not in said


def test_set_changes_one_place_of_an_alias(tmp_path: Path) -> None:
    text = MINIMAL.read_text().replace(
        "[{name: g, engine: {hf: {}}}]", "[{name: a, engine: &e {hf: {}}}, {name: b, engine: *e}]"
    )
    job = load_job(written(tmp_path / "job.yaml", text.encode()), overrides=["spec.generators[0].engine.hf.slots=2"])
    assert [pool.engine.value.slots for pool in job.spec.generators] == [2, 64]
