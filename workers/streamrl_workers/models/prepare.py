"""Makes the initial model ready, in a process of its own: `python -m streamrl_workers.models.prepare --job FILE --cache DIR [--result FILE]`.

- `scratch`: built, warmed up and saved as `DIR/<hash>`, or taken from there. The hash covers all that determines the
  result (`recipe_hash`). Invariant: `DIR/<hash>` is whole or absent; it is written beside and renamed.
- `path`, `huggingFace`: resolved to a directory; a hub model at exactly the revision asked for.
- The trained model of another run (`weightsFrom`), in place of all these.
- A teacher is fetched as well, and its tokenizer compared.
- Plug-ins are imported and their options checked, before anything takes time.
- A data set of the hub is fetched here too, and a chat template tried.

Consumes the validated job. Produces JSON lines on standard output: {"event": "warmup", "step", "steps", "loss"} at most
every `REPORT_EVERY_S`, and last {"event": "ready", "path", "parameters"}; with `--result`, {"path"} in that file when all is
done (`stream/run_folder.py`). Waits for nothing but the hub's download.
A user's mistake is one line on standard error and exit code 2. It ends at once when its parent is gone.
"""

import argparse
import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from streamrl_workers.process.heartbeat import start_heartbeat

if __name__ == "__main__":  # before imports that take seconds
    start_heartbeat()

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from streamrl import keys
from streamrl.errors import EXIT_DONE, EXIT_RETRY, EXIT_USER_ERROR, UserError, UserErrors
from streamrl.spec import RLJobSpec, read_job
from streamrl.spec.base import is_url
from streamrl.spec.model import ScratchModel
from streamrl.text import say
from streamrl_workers.answer_ends import end_tokens
from streamrl_workers.models.frozen import TEACHER, check_same_tokens, frozen_directory
from streamrl_workers.models.load import MODEL_PATTERNS, count_parameters, download, load_tokenizer
from streamrl_workers.models.scratch import build_model, build_tokenizer
from streamrl_workers.models.template_check import check_template
from streamrl_workers.models.warm_up import Survey, take_survey, warm_up, warm_up_pairs
from streamrl_workers.plugins.load import check_plugins
from streamrl_workers.process.shutdown import watch_parent
from streamrl_workers.stream.earlier_runs import take_model
from streamrl_workers.stream.object_store import StoreUnavailableError, local_directory, make_directory
from streamrl_workers.stream.run_folder import write_model_path
from streamrl_workers.tasks.dataset import MixedDataset, open_dataset

RECIPE = 2
"""Version of the code that makes a scratch model; raise it when the same inputs give another model."""

SMALL_PARAMETERS = 5_000_000
"""Below this the operations of a step are so short that threads mostly wait for each other (28 times slower was seen)."""
REPORT_EVERY_S = 0.5
"""Seconds between two lines of progress: a person reads them."""

_HASH_CHARACTERS = 16

Report = Callable[[Mapping[str, Any]], None]


def main() -> int:
    """The process: read the arguments, prepare, report."""
    parser = argparse.ArgumentParser(
        prog="streamrl_workers.models.prepare", description="Make the initial model ready."
    )
    parser.add_argument("--job", type=Path, required=True, help="the validated RLJob as JSON")
    parser.add_argument("--cache", type=Path, required=True, help="directory of warmed-up models")
    parser.add_argument("--result", type=Path, help="file that says where the model is, when it is ready")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(EXIT_RETRY))  # as a container's first process it would be deaf
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call] # untyped in transformers
    output = sys.stdout
    try:
        watch_parent(os.environ)
        # What user code or a library prints must not get between the lines of progress.
        with contextlib.redirect_stdout(sys.stderr):
            directory = prepare(
                read_job(arguments.job).spec,
                cache_dir=arguments.cache,
                base_dir=Path(os.environ.get(keys.ENV_CODE_DIR) or arguments.job.parent),
                store_dir=Path(store) if (store := os.environ.get(keys.ENV_STORE_DIR)) else None,
                report=lambda event: print(json.dumps(event), file=output, flush=True),
            )
            if arguments.result is not None:
                _make_mounted(arguments.cache)
                write_model_path(arguments.result, directory=directory)
    except (UserError, UserErrors) as error:
        say(*error.lines)
        return EXIT_USER_ERROR
    except StoreUnavailableError as error:
        say(str(error))
        return EXIT_RETRY
    return EXIT_DONE


def prepare(spec: RLJobSpec, *, cache_dir: Path, base_dir: Path, report: Report, store_dir: Path | None = None) -> Path:
    """Make the model of `spec` ready and return its directory. `store_dir`: of the job on its volume; None: a local run."""
    check_plugins(spec, directory=base_dir if store_dir is None else None)
    model, weights_from = spec.model, spec.storage.checkpoints.weights_from
    if weights_from is not None and store_dir is not None:
        directory = take_model(weights_from, store=store_dir)
    elif model.scratch is not None:
        directory = _prepare_scratch(spec, scratch=model.scratch, cache_dir=cache_dir, base_dir=base_dir, report=report)
    elif model.hugging_face is not None:
        directory = download(model.hugging_face)
    else:
        assert model.path is not None
        directory = _find_directory(model.path.directory, base_dir=base_dir, cache_dir=cache_dir)
    tokenizer = load_tokenizer(str(directory))  # here the user's mistakes are one line
    check_template(tokenizer, model_path=str(directory))
    end_tokens(directory, tokenizer)
    if spec.algorithm.teacher is not None:
        teacher = frozen_directory(spec.algorithm.teacher, base_dir=base_dir, field=TEACHER, fetched=False)
        check_same_tokens(teacher, policy=str(directory), field=TEACHER)
    _try_task(spec, base_dir=base_dir, directory=directory)
    report({"event": "ready", "path": str(directory), "parameters": count_parameters(str(directory))})
    return directory


def _make_mounted(cache_dir: Path) -> None:
    """Directories of which a pod's next container sees no more of the volume; a kubelet would make them as another user."""
    with _file_errors(cache_dir):
        cache_dir.mkdir(parents=True, exist_ok=True)
        Path(os.environ.get("HF_HOME") or cache_dir).mkdir(parents=True, exist_ok=True)


def _find_directory(path: str, *, base_dir: Path, cache_dir: Path) -> Path:
    if not is_url(path):
        return (base_dir / path).resolve()
    with _file_errors(cache_dir):
        return local_directory(path, cache_dir=cache_dir, field="spec.model.path.directory", patterns=MODEL_PATTERNS)


def _try_task(spec: RLJobSpec, *, base_dir: Path, directory: Path) -> None:
    """Open what the task pool will open and what can take long or fail for the model's sake: here a download may take hours."""
    supervised = spec.algorithm.supervised
    datasets = [task.dataset for task in spec.task.tasks]
    if (
        spec.task.has_chat
        or supervised is not None
        or any(
            dataset.hugging_face is not None or (dataset.jsonl is not None and is_url(dataset.jsonl.path))
            for dataset in datasets
        )
    ):
        model_path = str(directory)
        opened = open_dataset(
            spec.task, seed=spec.seed, base_dir=base_dir, model_path=model_path, supervised=supervised
        )
        if supervised is not None:  # each row: what is wrong with one ends no run at its last step
            opened.only.check()


def recipe_hash(scratch: ScratchModel, *, seed: int, survey: Survey) -> str:
    """Name of a scratch model: the same for the same sizes, warm-up, seed, texts and `RECIPE`."""
    recipe = {
        "recipe": RECIPE,
        "scratch": scratch.model_dump(mode="json"),
        "seed": seed,
        "texts": survey.digest,
        "characters": sorted(survey.characters),
    }
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:_HASH_CHARACTERS]


def _prepare_scratch(
    spec: RLJobSpec, *, scratch: ScratchModel, cache_dir: Path, base_dir: Path, report: Report
) -> Path:
    dataset = open_dataset(spec.task, seed=spec.seed, base_dir=base_dir, supervised=spec.algorithm.supervised)
    survey = take_survey(dataset, spec=scratch.warm_up)
    directory = cache_dir.resolve() / recipe_hash(scratch, seed=spec.seed, survey=survey)

    def make(beside: Path) -> None:
        _make(scratch, dataset=dataset, survey=survey, seed=spec.seed, directory=beside, report=report)

    if not directory.is_dir():
        with _file_errors(cache_dir):
            make_directory(directory, make)
    return directory


def _make(
    scratch: ScratchModel, *, dataset: MixedDataset, survey: Survey, seed: int, directory: Path, report: Report
) -> None:
    tokenizer = build_tokenizer(survey.characters, max_positions=scratch.max_positions)
    model: PreTrainedModel = build_model(scratch, tokenizer=tokenizer, seed=seed)
    if model.num_parameters() < SMALL_PARAMETERS:
        torch.set_num_threads(1)
    pairs = warm_up_pairs(dataset, spec=scratch.warm_up)
    last_report_s = float("-inf")
    for progress in warm_up(model, tokenizer=tokenizer, pairs=pairs, spec=scratch.warm_up):
        now_s = time.monotonic()
        if now_s - last_report_s >= REPORT_EVERY_S or progress.step == progress.steps:
            last_report_s = now_s
            report({"event": "warmup", "step": progress.step, "steps": progress.steps, "loss": progress.loss})
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)


@contextlib.contextmanager
def _file_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise UserError(
            field="model cache",
            rule=f"cannot be written: {error}",
            got=str(directory),
            fix="free space, or set XDG_CACHE_HOME to a writable directory",
        ) from error


if __name__ == "__main__":
    sys.exit(main())
