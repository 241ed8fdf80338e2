"""Preparation: the cache by hash, what changes the hash, the lines that the runner reads, the examples."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from streamrl import keys
from streamrl.errors import EXIT_RETRY, UserError
from streamrl.spec import RLJobSpec, parse_job
from streamrl_workers.models.load import load_model, load_tokenizer
from streamrl_workers.models.prepare import prepare
from streamrl_workers.models.warm_up import take_survey, warm_up_pairs
from streamrl_workers.tasks.dataset import open_dataset
from support.supervised_jobs import supervised_job, write_rows

EXAMPLES = Path(__file__).parents[4] / "examples"
TINY = {
    "hiddenSize": 16,
    "layers": 1,
    "heads": 2,
    "intermediateSize": 16,
    "maxPositions": 64,
    "warmUp": {"steps": 3, "batchSize": 4},
}


def document(*, name: str = "chain-sum.yaml", model: Mapping[str, Any] | None = None, seed: int = 0) -> dict[str, Any]:
    job: dict[str, Any] = YAML(typ="safe").load((EXAMPLES / name).read_text(encoding="utf-8"))
    job["spec"] |= {"seed": seed, "model": model or {"scratch": TINY}}
    return job


def spec_of(**options: Any) -> RLJobSpec:
    return parse_job(document(**options)).spec


def prepared(spec: RLJobSpec, cache: Path) -> tuple[Path, list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    directory = prepare(spec, cache_dir=cache, base_dir=EXAMPLES, report=lambda event: events.append(dict(event)))
    return directory, events


def kinds_in_order(events: list[dict[str, Any]]) -> list[str]:
    """Kinds of events without repetition: how many lines of progress there are depends on the machine."""
    return list(dict.fromkeys(event["event"] for event in events))


def test_built_once_then_taken_from_the_cache(tmp_path: Path) -> None:
    directory, events = prepared(spec_of(), tmp_path)
    assert kinds_in_order(events) == ["warmup", "ready"]
    assert events[-2]["step"] == events[-2]["steps"] == 3
    model = load_model(str(directory))
    assert events[-1] == {"event": "ready", "path": str(directory), "parameters": model.num_parameters()}
    written = (directory / "model.safetensors").stat().st_mtime_ns

    again, events = prepared(spec_of(), tmp_path)
    assert again == directory
    assert [event["event"] for event in events] == ["ready"]
    assert (directory / "model.safetensors").stat().st_mtime_ns == written
    assert [path.name for path in tmp_path.iterdir()] == [directory.name]


def test_a_job_begins_with_the_trained_model_of_a_run_on_its_volume(tmp_path: Path) -> None:
    job = document()
    job["spec"]["storage"] = {"checkpoints": {"weightsFrom": {"claimName": "kept"}}}
    spec, store, old = parse_job(job).spec, tmp_path / "new-11111111", tmp_path / "old-00000000"
    (old / keys.DIR_CHECKPOINTS).mkdir(parents=True)

    def take() -> Path:
        return prepare(spec, cache_dir=store / "models", base_dir=EXAMPLES, report=lambda _: None, store_dir=store)

    with pytest.raises(UserError, match="weightsFrom: must name a run that has ended: its trained model is written"):
        take()
    trained, _ = prepared(spec_of(seed=1), tmp_path / "cache")
    shutil.copytree(trained, old / keys.DIR_EXPORT)
    directory = take()
    assert directory.is_relative_to(store / "models"), "all that the container with the user's functions sees"
    taken, exported = directory / "model.safetensors", old / keys.DIR_EXPORT / "model.safetensors"
    assert taken.samefile(exported), "no byte is copied on one volume"
    shutil.rmtree(old)
    assert take() == directory, "it is the job's own now"
    assert (store / "models").samefile(directory.parent)


def test_the_vocabulary_covers_prompts_targets_and_held_out(tmp_path: Path) -> None:
    spec = spec_of()
    tokenizer = load_tokenizer(str(prepared(spec, tmp_path)[0]))
    dataset = open_dataset(spec.task, seed=0, base_dir=EXAMPLES)
    for item in [
        *(dataset.item("train", 10_000 + i) for i in range(50)),
        *(dataset.item("held_out", i) for i in range(50)),
    ]:
        assert tokenizer.decode(tokenizer.encode(item.prompt + item.target)) == item.prompt + item.target


def test_whatever_shapes_the_model_changes_its_directory(tmp_path: Path) -> None:
    changed = [
        spec_of(),
        spec_of(seed=1),
        spec_of(model={"scratch": TINY | {"layers": 2}}),
        spec_of(model={"scratch": TINY | {"warmUp": {"steps": 2, "batchSize": 4}}}),
        spec_of(name="skewed-lengths.yaml"),
    ]
    assert len({prepared(spec, tmp_path)[0] for spec in changed}) == len(changed)


def test_rows_that_earned_too_little_shape_no_model(tmp_path: Path) -> None:
    write_rows(tmp_path, changed={0: {"completion": "nonsense"}})
    job = supervised_job(rewardField="reward", minReward=1.0)
    job["spec"]["model"] = {"scratch": TINY}
    spec = parse_job(job).spec
    directory = prepare(spec, cache_dir=tmp_path / "cache", base_dir=tmp_path, report=lambda _event: None)
    assert "n" not in load_tokenizer(str(directory)).get_vocab()


def test_a_format_function_that_changes_its_texts_changes_the_digest(tmp_path: Path, monkeypatch) -> None:
    spec = spec_of()
    assert spec.model.scratch is not None
    dataset = open_dataset(spec.task, seed=0, base_dir=EXAMPLES)
    before = take_survey(dataset, spec=spec.model.scratch.warm_up).digest
    monkeypatch.setattr("chain_sum.WORKED_PERCENT", 90)
    assert take_survey(dataset, spec=spec.model.scratch.warm_up).digest != before


def test_a_failed_warm_up_leaves_nothing(tmp_path: Path) -> None:
    def fail(event: Mapping[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(spec_of(), cache_dir=tmp_path, base_dir=EXAMPLES, report=fail)
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_cache_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="model cache: cannot be written"):
        prepared(spec_of(), tmp_path / "file")


def test_a_model_on_disk_is_resolved_from_the_job_files_directory(tmp_path: Path) -> None:
    made, _ = prepared(spec_of(), tmp_path)
    spec = spec_of(model={"path": {"directory": os.path.relpath(made, EXAMPLES)}})
    assert prepared(spec, tmp_path / "unused")[0] == made
    with pytest.raises(UserError, match="cannot be loaded"):
        prepared(spec_of(model={"path": {"directory": "no-such"}}), tmp_path)


def test_the_process_prints_json_lines_and_one_line_for_a_mistake(tmp_path: Path) -> None:
    def run(job: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        (tmp_path / "job.json").write_text(json.dumps(job), encoding="utf-8")
        command = [sys.executable, "-m", "streamrl_workers.models.prepare"]
        command += ["--job", str(tmp_path / "job.json"), "--cache", str(tmp_path / "cache")]
        environment = os.environ | {keys.ENV_CODE_DIR: str(EXAMPLES)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)

    good = run(document())
    assert good.returncode == 0, good.stderr
    assert kinds_in_order([json.loads(line) for line in good.stdout.splitlines()]) == ["warmup", "ready"]

    bad = run(document(model={"path": {"directory": "no-such"}}))
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.splitlines()[-1].startswith("tokenizer of ")


def test_the_process_ends_with_its_parent(tmp_path: Path) -> None:
    warm_up = {"steps": 100_000, "batchSize": 4}
    (tmp_path / "job.json").write_text(json.dumps(document(model={"scratch": TINY | {"warmUp": warm_up}})))
    command = [sys.executable, "-m", "streamrl_workers.models.prepare"]
    command += ["--job", str(tmp_path / "job.json"), "--cache", str(tmp_path / "cache")]
    read_end, write_end = os.pipe()
    environment = os.environ | {keys.ENV_CODE_DIR: str(EXAMPLES), keys.ENV_PARENT_WATCH_FD: str(read_end)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, pass_fds=(read_end,)) as process:
        try:
            os.close(read_end)
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["event"] == "warmup"
            os.close(write_end)
            assert process.wait(120) == EXIT_RETRY
        finally:
            process.kill()


@pytest.mark.parametrize("name", ["chain-sum.yaml", "skewed-lengths.yaml"])
def test_targets_of_the_examples_end_with_the_right_answer_unless_lazy(name: str) -> None:
    spec = spec_of(name=name)
    assert spec.model.scratch is not None
    dataset = open_dataset(spec.task, seed=0, base_dir=EXAMPLES)
    import chain_sum  # type: ignore[import-not-found] # the example's module; the data set put it on the path

    right = [
        chain_sum.is_right(prompt=pair.prompt, completion=pair.target, answer=None, metadata={})
        for pair in warm_up_pairs(dataset, spec=spec.model.scratch.warm_up.model_copy(update={"steps": 100}))
    ]
    share = sum(right) / len(right)
    assert share == 1.0 if name == "skewed-lengths.yaml" else 0.4 < share < 0.56
