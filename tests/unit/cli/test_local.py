"""What a run on this machine needs, checked before it starts."""

import json
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym.factory

from streamrl.errors import UserErrors
from streamrl.spec import RLJob
from streamrl_cli.jobfile import load_job
from streamrl_cli.local import job_problems, local_problems, reasoning_gym_names, unused_template
from streamrl_cli.user_function import check_function
from streamrl_workers.tasks.chat import RESERVED_ARGUMENTS
from streamrl_workers.trackers.registry import TRACKERS
from support.tree import ROOT

MINIMAL = ROOT / "tests/corpus/good/minimal.yaml"


def job_with(*overrides: str) -> RLJob:
    return load_job(MINIMAL, overrides=overrides, local=False)


def rules(job: RLJob, base_dir: Path) -> list[str]:
    return [f"{problem.field}: {problem.rule}" for problem in local_problems(job, base_dir=base_dir)]


def test_data_sets_read_from_the_sources_are_those_of_the_package() -> None:
    assert reasoning_gym_names() == set(reasoning_gym.factory.DATASETS)


def test_loading_raises_all_problems(tmp_path: Path) -> None:
    job = job_with("spec.model={path: {directory: x}}", "spec.task.dataset={jsonl: {path: y}}")
    file = tmp_path / "job.yaml"
    file.write_text(job.model_dump_json(by_alias=True, exclude_none=True))
    with pytest.raises(UserErrors) as caught:
        load_job(file)
    assert len(caught.value.errors) == 2


def test_a_model_directory_must_be_whole(tmp_path: Path) -> None:
    job = job_with("spec.model={path: {directory: model}}")
    directory = tmp_path / "model"
    field = "spec.model.path.directory"
    directory.mkdir()
    assert rules(job, tmp_path) == [
        f"{field}: must hold config.json",
        f"{field}: must hold weights (*.safetensors)",
        f"{field}: must hold a tokenizer",
    ]
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (directory / name).write_text("{}")
    assert rules(job, tmp_path) == []


@pytest.mark.parametrize(
    "config",
    [{"max_position_embeddings": 64}, {"n_positions": 64}, {"text_config": {"max_position_embeddings": 64}}],
    ids=json.dumps,
)
def test_the_models_own_length_counts(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "model").mkdir()
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / "model" / name).touch()
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    assert rules(job_with("spec.model={path: {directory: model}}"), tmp_path) == [
        "spec.task.sampling.maxTokens: must be below the model's 64 positions, which hold the prompt too"
    ]


def test_a_simulated_run_needs_no_model(tmp_path: Path) -> None:
    simulated = (
        "spec.model={path: {directory: x}}",
        "spec.generators[0].engine={simulated: {}}",
        "spec.trainer={engine: {simulated: {}}}",
    )
    assert rules(job_with(*simulated), tmp_path) == []


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("def f(*, a, b): ...", ""),
        ("def f(a, b, c=1): ...", ""),
        ("def f(**anything): ...", ""),
        ("f = lambda a, b: 0", ""),
        ("from os.path import join as f", ""),
        ("if True:\n    def f(a): ...", ""),
        ("class f: ...", ""),
        ("def f(a): ...", "must take the keyword arguments b"),
        ("def f(a, b, /): ...", "must take the keyword arguments a, b"),
        ("def f(a, b, c): ...", "must not need the arguments c"),
        ("async def f(a, b): ...", "must be a plain function, not async"),
        ("def g(a, b): ...", "names a function that own.py does not define"),
        ("def f(:", "names a module that is not Python"),
        ("\0", "names a module that is not Python"),
    ],
)
def test_functions_are_read_not_run(source: str, rule: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(f"raise SystemExit('it was run')\n{source}\n")
    problems = list(check_function("own:f", field="x", directory=tmp_path, arguments=("a", "b")))
    assert [problem.rule.split(":")[0] for problem in problems] == ([rule] if rule else [])


def test_a_reward_as_trl_takes_it_is_told_what_arrives(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def f(prompts, completions, **kwargs): ...")
    arguments = ("prompt", "completion", "answer", "metadata")
    (missing,) = check_function("own:f", field="x", directory=tmp_path, arguments=arguments)
    assert missing.rule == "must not need the arguments prompts, completions"
    (tmp_path / "own.py").write_text("def f(completions): ...")
    missing, _ = check_function("own:f", field="x", directory=tmp_path, arguments=arguments)
    assert missing.fix == "write `def f(*, prompt, completion, answer, metadata)`, which is called for each sample"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({"prompt": "1+1", "answer": 2}, ""),
        ({"question": "1+1", "answer": 2}, "promptField: y line 2 has no field prompt"),
        ({"prompt": "1+1"}, "answerField: y line 2 has no field answer"),
        ({"prompt": "", "answer": 2}, "promptField: y line 2: prompt must not be empty"),
        ([], "path: y line 2 must be an object"),
    ],
)
def test_first_lines_of_the_data_are_read(tmp_path: Path, line: object, problem: str) -> None:
    (tmp_path / "y").write_text(f'{{"prompt": "a", "answer": "b"}}\n{json.dumps(line)}\n')
    found = rules(
        job_with("spec.task.dataset={jsonl: {path: y}}", "spec.task.rewards=[{name: a, exactMatch: {}}]"), tmp_path
    )
    assert found == ([f"spec.task.dataset.jsonl.{problem}"] if problem else [])


def test_a_chat_template_that_is_not_used_is_a_warning(tmp_path: Path) -> None:
    tokenizer = tmp_path / "model" / "tokenizer_config.json"
    tokenizer.parent.mkdir()
    plain = job_with("spec.model={path: {directory: model}}")
    tokens = job_with(  # rows of tokens, which no template wrote
        "spec.model={path: {directory: model}}",
        "spec.task={dataset: {jsonl: {path: y}}, groupSize: 1, sampling: {maxTokens: 8}}",
        "spec.algorithm={supervised: {answers: Tokens}}",
        "spec.pipeline.mode=StreamSync",
        "spec.generators=[]",
    )
    for config, job, count in (
        ({"chat_template": "{{ messages }}"}, plain, 1),
        (
            {"chat_template": "{{ messages }}"},
            job_with("spec.model={path: {directory: model}}", "spec.task.chat={}"),
            0,
        ),
        ({"chat_template": "{{ messages }}"}, tokens, 0),
        ({}, plain, 0),
    ):
        tokenizer.write_text(json.dumps(config))
        assert len(list(unused_template(job, base_dir=tmp_path))) == count


def test_functions_may_stand_in_packages_beside_the_job_or_installed(tmp_path: Path) -> None:
    (tmp_path / "own/deep").mkdir(parents=True)
    (tmp_path / "own/deep/__init__.py").write_text("def f(a): ...")
    assert list(check_function("own.deep:f", field="x", directory=tmp_path, arguments=("a",))) == []
    assert list(check_function("reasoning_gym.utils:f", field="x", directory=tmp_path, arguments=("a",))) == []


@pytest.mark.parametrize("name", RESERVED_ARGUMENTS)
def test_arguments_of_the_chat_template_that_are_ours_are_refused_before_the_start(name: str, tmp_path: Path) -> None:
    job = job_with("spec.task.chat={templateArguments: {" + name + ": null}}")
    assert f"spec.task.chat.templateArguments.{name}: is set by the run" in rules(job, tmp_path)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (b"x = " + b"(" * 250 + b")" * 250, "is not Python: too many nested parentheses"),
        (b"x = " + b"-" * 200_000 + b"1", "is not Python: "),
        (b"x = 1 " + b"+ 1" * 200_000, "is not Python: "),
        (b"\x00", "is not Python: "),
        (b'"\\d\x1b[2J"\nx = (', "is not Python: "),
    ],
)
def test_a_module_that_no_parser_takes_is_one_line(source: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_bytes(source)
    [error] = check_function("mine:f", field="f", directory=tmp_path, arguments=())
    assert words in str(error)


def test_a_tracker_needs_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_with("spec.trackers={wandb: {}, tensorBoard: {}}")
    before = rules(job, tmp_path)
    monkeypatch.setitem(TRACKERS, "wandb", ("no_such_package", "wandb"))
    line = "spec.trackers.wandb: needs the package wandb, which is not installed"
    assert sorted(rules(job, tmp_path)) == sorted([*before, line])


def test_a_verifier_of_reasoning_gym_that_judges_wrongly_is_refused_before_the_start(tmp_path: Path) -> None:
    dataset = "spec.task.dataset={reasoningGym: {name: game_of_life_halting}}"
    job = job_with(dataset, "spec.task.rewards=[{name: right, verifier: {}}]")
    text = "spec.task.rewards[0].verifier: the verifier of game_of_life_halting scores every answer as True"
    assert text in rules(job, tmp_path)
    assert text in [f"{problem.field}: {problem.rule}" for problem in job_problems(job, base_dir=tmp_path)]
    assert text not in rules(job_with(dataset, "spec.task.rewards=[{name: right, exactMatch: {}}]"), tmp_path)


PLUGIN = """
class Mine(GroupAlgorithm):
    raise RuntimeError("it is read, not run")
    class Options(PluginOptions):
        most_tokens: int = 8
        rate: float = Field(default=1.0, alias="learningRate")
"""


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ("{class: 'loss:Mine', options: {mostTokens: 3, learningRate: 0.5}}", []),
        ("{class: 'loss:Mein'}", ["class: names a class that loss.py does not define"]),
        ("{class: 'loss:Mine', options: {mostToken: 3}}", ["options.mostToken: is not an option of Mine"]),
        ("{class: 'los:Mine'}", ["class: names a module that is not beside the job file ({directory})"]),
        ("{class: cispo, options: {clipHi: 3}}", ["options.clipHi: is not an option of Cispo"]),
        ("{class: cisp}", ["class: must be `module:Class`, or a name in the entry points streamrl.algorithms of an installed package"]),
    ],
)  # fmt: skip
def test_plug_ins_are_read_not_run(algorithm: str, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "loss.py").write_text(PLUGIN)
    found = rules(job_with(f"spec.algorithm={{python: {algorithm}}}"), tmp_path)
    assert found == [f"spec.algorithm.python.{line.format(directory=tmp_path)}" for line in expected]
