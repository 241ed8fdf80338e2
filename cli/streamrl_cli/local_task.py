"""Checks of a job's task that need this machine: data sets of Hugging Face, chat templates, rewards with packages or an endpoint.

Part of `local.py`. Owns no rule of the contract. Imports no user code and no heavy package: what only the data itself
can tell (columns, rows, the template's own errors) shows when the model is made ready.
"""

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from streamrl.errors import UserError
from streamrl.spec import RLJob
from streamrl.spec.task import HuggingFaceDataset, Reward
from streamrl_workers.tasks.chat import RESERVED_ARGUMENTS

PACKAGES = {"mathVerify": ("math_verify", "math-verify"), "http": ("httpx", "httpx")}
"""Reward -> module, name of the package."""
FILE_SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")
NEEDS_ANSWER = ("verifier", "exactMatch", "mathVerify")
"""Rewards that compare with the reference answer, which only reasoning-gym always brings along."""
_INSTALL = "install streamrl[worker]"


def task_problems(job: RLJob, base_dir: Path) -> Iterator[UserError]:
    """Find what the task of `job` would stumble over; relative paths begin at `base_dir`."""
    if job.spec.task.dataset.hugging_face is not None:
        yield from _check_dataset(job, job.spec.task.dataset.hugging_face, base_dir)
    yield from _check_chat(job, base_dir)
    for number, reward in enumerate(job.spec.task.rewards):
        yield from _check_reward(job, reward, field=f"spec.task.rewards[{number}].{reward.key}")


def _check_dataset(job: RLJob, dataset: HuggingFaceDataset, base_dir: Path) -> Iterator[UserError]:
    field = "spec.task.dataset.huggingFace"
    if importlib.util.find_spec("datasets") is None:
        yield UserError(field=field, rule="needs the package datasets, which is not installed", fix=_INSTALL)
    if job.spec.task.evaluation.split == dataset.split:
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
    chat, model = job.spec.task.chat, job.spec.model
    if chat is None:
        return
    for name in sorted(set(RESERVED_ARGUMENTS) & set(chat.template_arguments)):
        yield UserError(field=f"spec.task.chat.templateArguments.{name}", rule="is set by the run", fix="remove it")
    if job.spec.trainer.engine.simulated is not None:
        yield UserError(field="spec.task.chat", rule="needs a model, and a simulated run has none", fix="remove it")
    elif model.scratch is not None:
        yield UserError(
            field="spec.task.chat",
            rule="needs a tokenizer with a chat template, and a scratch model has none",
            fix="remove chat (a format function can write the prompt), or take spec.model.path or huggingFace",
        )
    elif model.path is not None and not _has_template(base_dir / model.path.directory):
        yield UserError(
            field="spec.task.chat",
            rule="needs a tokenizer with a chat template",
            got=model.path.directory,
            fix="take an instruction-tuned model, or remove chat",
        )


def _has_template(directory: Path) -> bool:
    """Whether a tokenizer there brings a template; True where only transformers can tell."""
    if (directory / "chat_template.jinja").is_file() or (directory / "additional_chat_templates").is_dir():
        return True
    try:
        config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # absent or broken: other checks say so
        return True
    return not isinstance(config, dict) or bool(config.get("chat_template"))


def _check_reward(job: RLJob, reward: Reward, *, field: str) -> Iterator[UserError]:
    module, package = PACKAGES.get(reward.key, ("", ""))
    if module and importlib.util.find_spec(module) is None:
        yield UserError(field=field, rule=f"needs the package {package}, which is not installed", fix=_INSTALL)
    dataset = job.spec.task.dataset.hugging_face
    if dataset is not None and dataset.answer_field is None and reward.key in NEEDS_ANSWER:
        yield UserError(
            field=field,
            rule="compares with the reference answer, and the data set names none",
            fix="set spec.task.dataset.huggingFace.answerField",
        )
    if reward.http is not None:
        yield from _check_endpoint(reward, field=field)


def _check_endpoint(reward: Reward, *, field: str) -> Iterator[UserError]:
    assert reward.http is not None
    if not _host(reward.http.url):
        yield UserError(field=f"{field}.url", rule="must name a host", got=reward.http.url)
    variable = reward.http.token_variable
    if variable is not None and not os.environ.get(variable, "").strip():
        yield UserError(
            field=f"{field}.tokenVariable",
            rule="must name an environment variable with a value",
            got=variable,
            fix="export it before the run",
        )


def _host(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:  # brackets that are none
        return None
