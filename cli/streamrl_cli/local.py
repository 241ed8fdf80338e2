"""What the local runner cannot honour is refused before anything starts.

Owns the checks that need this machine: files, modules, patterns, sizes that must fit together. Imports
no user code and no heavy package. Does not own the rules of the contract.
"""

import importlib.util
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from streamrl.errors import UserError
from streamrl.spec import RLJob
from streamrl.spec.generators import GeneratorPool
from streamrl.spec.parse import suggest
from streamrl.spec.task import ReasoningGymDataset
from streamrl_cli.local_task import task_problems
from streamrl_cli.user_function import check_function, functions_of
from streamrl_workers.scheduler.lengths.rankers.files import open_ranker

MAX_LOCAL_GENERATORS = {"hf": 64, "simulated": 1024}
"""Processes by engine: a transformers process holds about 0.9 GB before its first token."""

MAX_GROUP_BYTES = 48 * 2**20
"""A group is one message, of at most 64 MiB; the rest is for prompts and texts."""

_TOKEN_BYTES = 8
"""Of one completion token in a group: id and log-prob."""
_DATASET_NAME = re.compile(r"""(?:DATASET_NAME\s*=\s*|register_dataset\(\s*)["']([A-Za-z0-9_]+)["']""")
_MAX_ADVICE_CHARS = 200


def local_problems(job: RLJob, *, base_dir: Path) -> list[UserError]:
    """Find what a run of `job` on this machine would stumble over; relative paths begin at `base_dir`."""
    checks: tuple[Callable[[RLJob, Path], Iterator[UserError]], ...] = (
        _check_packages,
        _check_model,
        _check_lengths,
        _check_groups,
        _check_dataset,
        task_problems,
        _check_functions,
        _check_patterns,
        _check_processes,
        _check_ranker,
    )
    return [problem for check in checks for problem in check(job, base_dir)]


def run_problems(job: RLJob, *, base_dir: Path) -> list[UserError]:
    """As `local_problems`, and what stops `streamrl run` alone: a suspended job is a good one, but nothing would run."""
    suspended = UserError(
        field="spec.suspend",
        rule="must be false in a local run: a suspended job has no processes",
        got=True,
        fix="remove it, or add --set spec.suspend=false",
    )
    nodes = UserError(
        field="spec.trainer.nodes",
        rule="must be 1 in a local run: this is one machine",
        got=job.spec.trainer.nodes,
        fix="give processesPerNode instead",
    )
    return [
        *([suspended] if job.spec.suspend else []),
        *([nodes] if job.spec.trainer.nodes > 1 else []),
        *local_problems(job, base_dir=base_dir),
    ]


def job_problems(job: RLJob, *, base_dir: Path) -> list[UserError]:
    """Find what `job` would stumble over wherever it runs: nothing of this machine's packages, files and processes."""
    checks = (_check_lengths, _check_groups, _check_reasoning_gym_name, _check_patterns)
    return [problem for check in checks for problem in check(job, base_dir)]


def _is_simulated(job: RLJob) -> bool:
    return job.spec.trainer.engine.key == "simulated"


def _check_packages(job: RLJob, _base_dir: Path) -> Iterator[UserError]:
    ranker = job.spec.scheduling.ranker
    learned = ranker is not None and ranker.key in ("languageModel", "policyFeatures")
    field = "spec.scheduling.ranker" if _is_simulated(job) and learned else "spec.trainer.engine"
    packages = ["torch", "transformers"] if learned or not _is_simulated(job) else []
    for package in ["grpc", *packages]:
        if importlib.util.find_spec(package) is None:
            fix = "install streamrl[worker]"
            yield UserError(field=field, rule=f"needs the package {package}, which is not installed", fix=fix)


def _check_ranker(job: RLJob, base_dir: Path) -> Iterator[UserError]:
    try:
        open_ranker(job.spec.scheduling.ranker, base_dir=base_dir)
    except UserError as problem:
        yield problem


def _check_model(job: RLJob, base_dir: Path) -> Iterator[UserError]:
    if job.spec.model.path is None or _is_simulated(job):
        return
    field, given = "spec.model.path.directory", job.spec.model.path.directory
    directory = base_dir / given
    if not directory.is_dir():
        yield UserError(field=field, rule="must be a directory", got=given, fix=f"there is none at {directory}")
        return
    if not (directory / "config.json").is_file():
        yield UserError(field=field, rule="must hold config.json", got=given, fix="save the model with save_pretrained")
    if not [*directory.glob("*.safetensors"), *directory.glob("*.bin")]:
        yield UserError(
            field=field, rule="must hold weights (*.safetensors)", got=given, fix="save the model with save_pretrained"
        )
    if not [*directory.glob("tokenizer*"), *directory.glob("vocab*")]:
        yield UserError(
            field=field, rule="must hold a tokenizer", got=given, fix="save the tokenizer there with save_pretrained"
        )


def _check_lengths(job: RLJob, base_dir: Path) -> Iterator[UserError]:
    positions = _positions(job, base_dir)
    tokens = job.spec.task.sampling.max_tokens
    if positions is not None and tokens >= positions:
        rule = f"must be below the model's {positions} positions, which hold the prompt too"
        yield UserError(
            field="spec.task.sampling.maxTokens", rule=rule, got=tokens, fix="lower it or take a longer model"
        )


def _check_groups(job: RLJob, base_dir: Path) -> Iterator[UserError]:
    task = job.spec.task
    sample, most = task.sampling.max_tokens, MAX_GROUP_BYTES // _TOKEN_BYTES
    rule = f"times spec.task.sampling.maxTokens must be at most {most} tokens: a group is one message"
    positions = _positions(job, base_dir)
    if task.environment is not None and positions is not None:
        # An observation has a token for each character at most; where the positions are not known, only one turn is.
        sample = min(positions, task.environment.max_turns * (sample + task.environment.max_observation_chars))
        rule = (
            f"times the longest sample (turns and observations) must be at most {most} tokens: a group is one message"
        )
    tokens = task.group_size * sample
    if tokens > most:
        yield UserError(field="spec.task.groupSize", rule=rule, got=tokens, fix="lower one of the two")


def _positions(job: RLJob, base_dir: Path) -> int | None:
    """Longest sequence of the model, as far as it is known without loading it."""
    if _is_simulated(job):
        return None
    if job.spec.model.scratch is not None:
        return job.spec.model.scratch.max_positions
    if job.spec.model.path is None:
        return None
    try:
        config = json.loads((base_dir / job.spec.model.path.directory / "config.json").read_text(encoding="utf-8"))
        return int(config["max_position_embeddings"])
    except (OSError, ValueError, TypeError, KeyError):  # absent or odd: transformers has the last word at start
        return None


def _check_dataset(job: RLJob, base_dir: Path) -> Iterator[UserError]:
    dataset = job.spec.task.dataset
    if dataset.jsonl is not None:
        yield from _check_jsonl(dataset.jsonl.path, base_dir)
    if dataset.reasoning_gym is not None:
        yield from _check_reasoning_gym(dataset.reasoning_gym)


def _check_reasoning_gym_name(job: RLJob, _base_dir: Path) -> Iterator[UserError]:
    """As far as this machine can tell: without the package no name is known."""
    dataset = job.spec.task.dataset.reasoning_gym
    if dataset is not None and reasoning_gym_names() is not None:
        yield from _check_reasoning_gym(dataset)


def _check_jsonl(given: str, base_dir: Path) -> Iterator[UserError]:
    field, path = "spec.task.dataset.jsonl.path", base_dir / given
    if not path.is_file():
        yield UserError(field=field, rule="must be a file", got=given, fix=f"there is none at {path}")
    elif path.stat().st_size == 0:
        yield UserError(field=field, rule="must hold at least one line", got=given)


def _check_reasoning_gym(dataset: ReasoningGymDataset) -> Iterator[UserError]:
    field = "spec.task.dataset.reasoningGym"
    known = reasoning_gym_names()
    if known is None:
        yield UserError(
            field=field, rule="needs the package reasoning-gym, which is not installed", fix="install streamrl[worker]"
        )
    elif dataset.name not in known:
        rule = "is not a data set of reasoning-gym"
        yield UserError(
            field=f"{field}.name", rule=rule, got=dataset.name, fix=_shortened(suggest(dataset.name, sorted(known)))
        )
    for name in sorted({"seed", "size"} & set(dataset.parameters)):
        yield UserError(field=f"{field}.parameters.{name}", rule="is set by spec.seed and the run", fix="remove it")


def reasoning_gym_names() -> set[str] | None:
    """Names of its data sets, read from its sources: its import takes seconds. None: not installed."""
    found = importlib.util.find_spec("reasoning_gym")
    if found is None or found.origin is None:
        return None
    sources = Path(found.origin).parent.rglob("*.py")
    return {name for source in sources for name in _DATASET_NAME.findall(source.read_text(encoding="utf-8"))}


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_ADVICE_CHARS else f"{text[:_MAX_ADVICE_CHARS]}…"


def _check_functions(job: RLJob, base_dir: Path) -> Iterator[UserError]:
    for function in functions_of(job):
        yield from check_function(function.name, field=function.field, directory=base_dir, arguments=function.arguments)


def _check_patterns(job: RLJob, _base_dir: Path) -> Iterator[UserError]:
    for index, reward in enumerate(job.spec.task.rewards):
        name = "pattern" if reward.regex else "answerPattern"
        pattern = getattr(reward.value, "pattern", None) or getattr(reward.value, "answer_pattern", None)
        try:
            re.compile(pattern or "")
        except (re.error, OverflowError, RecursionError) as error:
            field = f"spec.task.rewards[{index}].{reward.key}.{name}"
            yield UserError(field=field, rule=f"must be a regular expression of Python ({error})", got=pattern)


def _check_processes(job: RLJob, _base_dir: Path) -> Iterator[UserError]:
    for engine, most in MAX_LOCAL_GENERATORS.items():
        total = sum(_replicas(pool) for pool in job.spec.generators if pool.engine.key == engine)
        if total > most:
            rule = f"ask for {total} replicas of engine {engine}; a local run starts at most {most}"
            yield UserError(field="spec.generators", rule=rule, fix="lower the replicas of scaling or raise slots")


def _replicas(pool: GeneratorPool) -> int:
    return pool.scaling.most
