"""What the local runner cannot honour is refused before anything starts; what it does not use is named.

Owns the checks that need this machine: files, modules, patterns, sizes that must fit together, data sets, chat templates,
rewards with packages or an endpoint, the first lines of JSONL files. What only all of the data can tell (other rows, the template's
own errors) shows when the model is made ready. Imports no user code and no heavy package. Does not own the rules of the contract.
"""

import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from streamrl.errors import UserError
from streamrl.files import read_json
from streamrl.spec import RLJob
from streamrl.spec.base import SpecModel, is_url
from streamrl.spec.parse import suggest
from streamrl.spec.task import SingleTask
from streamrl.spec.tasks.datasets import HuggingFaceDataset, JsonlDataset, ReasoningGymDataset
from streamrl.spec.tasks.rewards import Reward
from streamrl_cli.user_function import check_class, check_function, functions_of
from streamrl_workers.plugins.kinds import plugins_of
from streamrl_workers.ranker.folder import check_ranker
from streamrl_workers.tasks.chat import RESERVED_ARGUMENTS, positions_of
from streamrl_workers.tasks.jsonl import check_first_lines
from streamrl_workers.tasks.procedural import refused_verifiers
from streamrl_workers.trackers.registry import missing_packages

_DATASET_NAME = re.compile(r"""(?:DATASET_NAME\s*=\s*|register_dataset\(\s*)["']([A-Za-z0-9_]+)["']""")
_MAX_ADVICE_CHARS = 200
PACKAGES = {"mathVerify": ("math_verify", "math-verify"), "http": ("httpx", "httpx")}
"""Reward -> module, name of the package."""
FILE_SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")
NEEDS_ANSWER = ("verifier", "exactMatch", "mathVerify")
"""Rewards that compare with the reference answer, which only reasoning-gym always brings along."""
MOST_AGENT_HOSTS = 64
"""Of a local run: each is two processes of Python beside its programs."""
_INSTALL = "install streamrl[worker]"
_OF_CLUSTERS = (
    "managed_by",
    "gang",
    "start_deadline_seconds",
    "active_deadline_seconds",
    "ttl_seconds_after_finished",
)
_VOLUME = ("storage_class_name", "size", "claim_name", "when_deleted")


def local_problems(job: RLJob, *, base_dir: Path) -> list[UserError]:
    """Find what a run of `job` on this machine would stumble over; relative paths begin at `base_dir`."""
    checks: tuple[Callable[[RLJob, Path], Iterator[UserError]], ...] = (
        _check_packages,
        _check_model,
        _check_lengths,
        _check_dataset,
        _check_verifiers,
        _check_chat,
        _check_rewards,
        _check_functions,
        _check_plugins,
        _check_patterns,
        _check_processes,
        _check_agents,
        _check_ranker,
        _check_trackers,
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
    checks = (_check_lengths, _check_reasoning_gym_name, _check_verifiers, _check_patterns)
    return [problem for check in checks for problem in check(job, base_dir)]


def _check_packages(job: RLJob, _base_dir: Path) -> Iterator[UserError]:
    ranker = job.spec.scheduling.ranker
    learned = ranker is not None and ranker.language_model is not None
    field = "spec.scheduling.ranker" if learned and not job.spec.has_model else "spec.trainer.engine"
    packages = ["torch", "transformers"] if learned or job.spec.has_model else []
    for package in ["grpc", *packages]:
        yield from _missing(package, field=field)


def _missing(module: str, *, field: str, package: str = "") -> Iterator[UserError]:
    if importlib.util.find_spec(module) is None:
        rule = f"needs the package {package or module}, which is not installed"
        yield UserError(field=field, rule=rule, fix=_INSTALL)


def _check_ranker(job: RLJob, base_dir: Path) -> Iterator[UserError]:
    try:
        check_ranker(job.spec.scheduling.ranker, base_dir=base_dir)
    except UserError as problem:
        yield problem


def _check_trackers(job: RLJob, _base_dir: Path) -> Iterator[UserError]:
    yield from missing_packages(job.spec.trackers)


def _check_model(job: RLJob, base_dir: Path) -> Iterator[UserError]:
    for field, given in model_directories(job):
        if not is_url(given):  # there the store has the last word at start
            yield from _check_directory(base_dir / given, field=field, given=given)


def model_directories(job: RLJob) -> Iterator[tuple[str, str]]:
    """Field and value of each directory that a model is loaded from."""
    if not job.spec.has_model:
        return
    if job.spec.model.path is not None:
        yield "spec.model.path.directory", job.spec.model.path.directory
    teacher = job.spec.algorithm.teacher
    if teacher is not None and teacher.path is not None:
        yield "spec.algorithm.distillation.teacher.path.directory", teacher.path.directory


def _check_directory(directory: Path, *, field: str, given: str) -> Iterator[UserError]:
    if not directory.is_dir():
        yield UserError(field=field, rule="must be a directory", got=given, fix=f"there is none at {directory}")
        return
    for what, patterns, fix in (
        ("config.json", ("config.json",), "save the model with save_pretrained"),
        ("weights (*.safetensors)", ("*.safetensors",), "save the model with save_pretrained"),
        ("a tokenizer", ("tokenizer*", "vocab*"), "save the tokenizer there with save_pretrained"),
    ):
        if not any(path for pattern in patterns for path in directory.glob(pattern)):
            yield UserError(field=field, rule=f"must hold {what}", got=given, fix=fix)


def _check_lengths(job: RLJob, base_dir: Path) -> Iterator[UserError]:
    positions = _positions(job, base_dir)
    tokens = job.spec.task.sampling.max_tokens
    if positions is not None and tokens >= positions:
        rule = f"must be below the model's {positions} positions, which hold the prompt too"
        yield UserError(
            field="spec.task.sampling.maxTokens", rule=rule, got=tokens, fix="lower it or take a longer model"
        )


def _positions(job: RLJob, base_dir: Path) -> int | None:
    """Longest sequence of the model, as far as it is known without loading it."""
    if not job.spec.has_model:
        return None
    if job.spec.model.scratch is not None:
        return job.spec.model.scratch.max_positions
    if job.spec.model.path is None:
        return None
    try:
        return positions_of(read_json(base_dir / job.spec.model.path.directory / "config.json"))
    except ValueError:  # absent or odd: transformers has the last word at start
        return None


def _check_dataset(job: RLJob, base_dir: Path) -> Iterator[UserError]:
    for task in job.spec.task.tasks:
        dataset = task.dataset
        if dataset.jsonl is not None and not is_url(dataset.jsonl.path):
            given = dataset.jsonl.path
            field = f"{task.field}.dataset.jsonl.path"
            unreadable = list(check_data_file(base_dir / given, field=field, given=given))
            yield from unreadable or _check_first_lines(job, task, dataset.jsonl, base_dir)
        if dataset.reasoning_gym is not None:
            yield from _check_reasoning_gym(dataset.reasoning_gym, field=f"{task.field}.dataset.reasoningGym")
        if dataset.hugging_face is not None:
            yield from _check_dataset_source(task, dataset.hugging_face, base_dir)


def _imitates_tokens(job: RLJob) -> bool:
    supervised = job.spec.algorithm.supervised
    return supervised is not None and supervised.answers == "Tokens"


def _check_first_lines(job: RLJob, task: SingleTask, dataset: JsonlDataset, base_dir: Path) -> Iterator[UserError]:
    try:
        check_first_lines(dataset, base_dir=base_dir, answered=not _imitates_tokens(job))
    except UserError as problem:
        field = f"{task.field}{problem.field.removeprefix('spec.task')}"
        yield UserError(field=field, rule=problem.rule, got=problem.got, fix=problem.fix)


def _check_reasoning_gym_name(job: RLJob, _base_dir: Path) -> Iterator[UserError]:
    """As far as this machine can tell: without the package no name is known."""
    for task in job.spec.task.tasks:
        if task.dataset.reasoning_gym is not None and reasoning_gym_names() is not None:
            field = f"{task.field}.dataset.reasoningGym"
            yield from _check_reasoning_gym(task.dataset.reasoning_gym, field=field)


def _check_verifiers(job: RLJob, _base_dir: Path) -> Iterator[UserError]:
    for task in job.spec.task.tasks:
        yield from refused_verifiers(task)


def check_data_file(path: Path, *, field: str, given: str) -> Iterator[UserError]:
    """Find what keeps a file from being read as the data set; `field` names it as `given`."""
    if not path.is_file():
        yield UserError(field=field, rule="must be a file", got=given, fix=f"there is none at {path}")
    elif path.stat().st_size == 0:
        yield UserError(field=field, rule="must hold at least one line", got=given)


def _check_reasoning_gym(dataset: ReasoningGymDataset, *, field: str) -> Iterator[UserError]:
    known = reasoning_gym_names()
    yield from _missing("reasoning_gym", field=field, package="reasoning-gym")
    if known is not None and dataset.name not in known:
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


def _check_plugins(job: RLJob, base_dir: Path) -> Iterator[UserError]:
    for plugin in plugins_of(job.spec):
        yield from check_class(plugin, directory=base_dir)


def _check_patterns(job: RLJob, _base_dir: Path) -> Iterator[UserError]:
    for field, _, reward in _rewards(job):
        name = "pattern" if reward.regex else "answerPattern"
        pattern = getattr(reward.value, "pattern", None) or getattr(reward.value, "answer_pattern", None)
        try:
            re.compile(pattern or "")
        except (re.error, OverflowError, RecursionError) as error:
            yield UserError(
                field=f"{field}.{name}", rule=f"must be a regular expression of Python ({error})", got=pattern
            )


def _check_processes(job: RLJob, _base_dir: Path) -> Iterator[UserError]:
    for engine, most in {pool.engine.key: pool.engine.common.most_local for pool in job.spec.generators}.items():
        total = sum(pool.scaling.most for pool in job.spec.generators if pool.engine.key == engine)
        if total > most:
            rule = f"ask for {total} replicas of engine {engine}; a local run starts at most {most}"
            yield UserError(field="spec.generators", rule=rule, fix="lower the replicas of scaling or raise slots")


def _check_agents(job: RLJob, _base_dir: Path) -> Iterator[UserError]:
    pool = job.spec.agent_pool
    if pool is not None and pool.scaling.most > MOST_AGENT_HOSTS:
        field, rule = (
            "spec.task.agent.pool.scaling",
            f"must ask for at most {MOST_AGENT_HOSTS} agent hosts in a local run",
        )
        yield UserError(field=field, rule=rule, got=pool.scaling.most, fix="raise task.agent.sessions instead")


def _check_rewards(job: RLJob, _base_dir: Path) -> Iterator[UserError]:
    for field, task, reward in _rewards(job):
        yield from _check_reward(task, reward, field=field)


def _rewards(job: RLJob) -> Iterator[tuple[str, SingleTask, Reward]]:
    """Field, task and reward, of all tasks."""
    for task in job.spec.task.tasks:
        for number, reward in enumerate(task.rewards):
            yield f"{task.field}.rewards[{number}].{reward.key}", task, reward


def _check_dataset_source(task: SingleTask, dataset: HuggingFaceDataset, base_dir: Path) -> Iterator[UserError]:
    field = f"{task.field}.dataset.huggingFace"
    yield from _missing("datasets", field=field)
    if task.held_out_split == dataset.split:
        yield UserError(
            field="spec.task.evaluation.split",
            rule="must differ from the split that is trained",
            got=dataset.split,
            fix="leave it out to hold back a share of the training split",
        )
    if dataset.path is None:
        return
    path = base_dir / dataset.path
    if dataset.revision is not None:
        yield UserError(field=f"{field}.revision", rule="goes with name, a path has none", got=dataset.revision)
    if not path.exists():
        rule, fix = "must be a directory or a file", f"there is none at {path}"
        yield UserError(field=f"{field}.path", rule=rule, got=dataset.path, fix=fix)
    elif path.is_file() and path.suffix not in FILE_SUFFIXES:
        rule = f"a file must end in one of {', '.join(FILE_SUFFIXES)}"
        yield UserError(field=f"{field}.path", rule=rule, got=dataset.path)


def _check_chat(job: RLJob, base_dir: Path) -> Iterator[UserError]:
    model, chats = job.spec.model, {f"{task.field}.chat": task.chat for task in job.spec.task.tasks if task.chat}
    if not chats:
        return
    field = next(iter(chats))  # of a mixture all have one
    for where, chat in chats.items():
        for name in sorted(set(RESERVED_ARGUMENTS) & set(chat.template_arguments)):
            yield UserError(field=f"{where}.templateArguments.{name}", rule="is set by the run", fix="remove it")
    if not job.spec.has_model:
        yield UserError(field=field, rule="needs a model, and a simulated run has none", fix="remove it")
    elif model.scratch is not None:
        yield UserError(
            field=field,
            rule="needs a tokenizer with a chat template, and a scratch model has none",
            fix="remove chat (a format function can write the prompt), or take spec.model.path or huggingFace",
        )
    elif (
        model.path is not None
        and not is_url(model.path.directory)
        and not _has_template(base_dir / model.path.directory)
    ):
        yield UserError(
            field=field,
            rule="needs a tokenizer with a chat template",
            got=model.path.directory,
            fix="take an instruction-tuned model, or remove chat",
        )


def unused_template(job: RLJob, *, base_dir: Path) -> Iterator[str]:
    """Yield a line if the model has a chat template and prompts go to it without one."""
    path = job.spec.model.path if job.spec.has_model and job.spec.task.agent is None else None
    if (
        path is None
        or _imitates_tokens(job)
        or is_url(path.directory)
        or not (base_dir / path.directory / "tokenizer_config.json").is_file()
    ):
        return
    plain = [task for task in job.spec.task.tasks if task.chat is None and task.format is None]
    if plain and _has_template(base_dir / path.directory):
        yield f"{plain[0].field}.chat: is not set, so the model's chat template is not used; add chat: {{}} if prompts are turns"


def _has_template(directory: Path) -> bool:
    """Whether a tokenizer there brings a template; True where only transformers can tell."""
    if (directory / "chat_template.jinja").is_file() or (directory / "additional_chat_templates").is_dir():
        return True
    try:
        config = read_json(directory / "tokenizer_config.json")
    except UserError:  # absent or broken: other checks say so
        return True
    return not isinstance(config, dict) or bool(config.get("chat_template"))


def _check_reward(task: SingleTask, reward: Reward, *, field: str) -> Iterator[UserError]:
    if reward.key in PACKAGES:
        module, package = PACKAGES[reward.key]
        yield from _missing(module, field=field, package=package)
    dataset = task.dataset.hugging_face
    if dataset is not None and dataset.answer_field is None and reward.key in NEEDS_ANSWER:
        yield UserError(
            field=field,
            rule="compares with the reference answer, and the data set names none",
            fix=f"set {task.field}.dataset.huggingFace.answerField",
        )
    if reward.http is not None:
        yield from _check_endpoint(reward, field=field)


def _check_endpoint(reward: Reward, *, field: str) -> Iterator[UserError]:
    assert reward.http is not None
    if reward.http.host is None:
        yield UserError(field=f"{field}.url", rule="must name a host", got=reward.http.url)
    variable = reward.http.token_variable
    if variable is not None and not os.environ.get(variable, "").strip():
        yield UserError(
            field=f"{field}.tokenVariable",
            rule="must name an environment variable with a value",
            got=variable,
            fix="export it before the run",
        )


def unused_note(job: RLJob) -> str:
    """One line that names what `unused_locally` finds; empty if there are none."""
    fields = list(unused_locally(job))
    return f"not used by a local run (for Kubernetes): {', '.join(fields)}" if fields else ""


def unused_locally(job: RLJob) -> Iterator[str]:
    """Paths of the fields, set to something else than their default, that only Kubernetes has a use for."""
    spec = job.spec
    yield from _set(spec.task, ("code",), path="spec.task")
    if spec.agent_pool is not None:
        yield from _set(spec.agent_pool, ("egress", "pod"), path="spec.task.agent.pool")
        yield from _set(spec.agent_pool.scaling, ("external",), path="spec.task.agent.pool.scaling")
    for index, pool in enumerate(spec.generators):
        yield from _set(pool, ("pod",), path=f"spec.generators[{index}]")
        yield from _set(pool.scaling, ("external",), path=f"spec.generators[{index}].scaling")
    yield from _set(spec.trainer, ("pod", "disruption"), path="spec.trainer")
    yield from _set(
        spec.storage.checkpoints, (*_VOLUME, "resume_from", "weights_from"), path="spec.storage.checkpoints"
    )
    yield from _set(spec.storage.journal, _VOLUME, path="spec.storage.journal")
    yield from _set(spec.failure_policy, ("rules",), path="spec.failurePolicy")
    yield from _set(spec, _OF_CLUSTERS, path="spec")


def _set(model: SpecModel, names: tuple[str, ...], *, path: str) -> Iterator[str]:
    changed = model.model_dump(by_alias=False, exclude_defaults=True)
    for name in names:
        if name in changed:
            yield f"{path}.{type(model).model_fields[name].alias}"
