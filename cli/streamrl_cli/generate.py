"""`streamrl generate --checkpoint RUN|DIR --prompt TEXT`: tries a trained model with the engine that trained it.

A run whose job has `task.chat` was trained on conversations: a prompt is then the user's turn in its chat template,
which puts the special tokens in. `task.format` is not applied: a prompt is what the model reads. Completions end where those of the run did.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from streamrl import keys
from streamrl.errors import EXIT_DONE, UserError
from streamrl.proto import stream_pb2 as pb
from streamrl.spec import read_job
from streamrl.spec.task import Chat, SingleTask
from streamrl_cli import console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `streamrl generate`."""
    parser.add_argument(
        "--checkpoint", type=Path, required=True, metavar="RUN", help="a run folder, or a directory with config.json"
    )
    parser.add_argument("--prompt", action="append", required=True, help="a prompt; may be given several times")
    parser.add_argument("--max-tokens", type=int, default=64, help="longest completion in tokens (default: 64)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 = the most likely token each time (default)")
    parser.add_argument("--samples", type=int, default=1, help="completions of each prompt (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the samples (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Print each prompt with its completion."""
    _check(args)
    directory = model_directory(args.checkpoint)
    from streamrl_workers.generator.engines.hf.engine import complete
    from streamrl_workers.models.load import load_config, load_tokenizer
    from streamrl_workers.models.template_check import check_template

    load_config(str(directory))  # is refused before the tokenizer's library warns of it
    check_template(load_tokenizer(str(directory)), model_path=str(directory))
    task = task_of(args.checkpoint)
    chat = None if task is None else task.chat
    stop = () if task is None else task.sampling.stop
    sampling = pb.Sampling(temperature=args.temperature, top_p=1.0, max_tokens=args.max_tokens, stop=stop)
    asked = [prompt for prompt in args.prompt for _ in range(args.samples)]
    texts = complete(
        in_chat(asked, chat=chat, directory=directory),
        model_path=str(directory),
        sampling=sampling,
        seed=args.seed,
        add_special_tokens=chat is None,
    )
    between = "" if chat is None else "\n"
    for prompt, text in zip(asked, texts, strict=True):
        console.out(*f"{prompt}{between}{text}".split("\n"))
    return EXIT_DONE


def task_of(checkpoint: Path) -> SingleTask | None:
    """Return the first task of the run that `checkpoint` is, or whose exported model it is; None for other directories."""
    model = checkpoint.resolve()
    run = model.parent if model.name == keys.DIR_EXPORT else model
    job_file = run / keys.FILE_JOB
    return read_job(job_file, beneath=run).spec.task.tasks[0] if job_file.is_file() else None


def in_chat(prompts: Sequence[str], *, chat: Chat | None, directory: Path) -> list[str]:
    """The prompts as the model has seen them in training. Raises `UserError` if the template cannot be used."""
    if chat is None:
        return list(prompts)
    from streamrl_workers.tasks.chat import open_chat

    template = open_chat(chat, model_path=str(directory))
    return [template.prompt(prompt) for prompt in prompts]


def _check(args: argparse.Namespace) -> None:
    for flag, value in (("--max-tokens", args.max_tokens), ("--samples", args.samples)):
        if value < 1:
            raise UserError(field=flag, rule="must be at least 1", got=value)
    if args.temperature < 0:
        raise UserError(field="--temperature", rule="must be at least 0", got=args.temperature)


def model_directory(checkpoint: Path) -> Path:
    """Directory of the model that `--checkpoint` names. Raises `UserError`: there is none."""
    for directory in (checkpoint / keys.DIR_EXPORT, checkpoint):
        if (directory / "config.json").is_file():
            return directory
    if (checkpoint / keys.FILE_JOB).is_file():
        raise UserError(
            field="--checkpoint",
            rule="has no trained model yet (it is written when the run ends)",
            got=str(checkpoint),
            fix=f"let it end: streamrl run --resume {checkpoint}",
        )
    raise UserError(
        field="--checkpoint",
        rule="must be a run folder or a directory with config.json",
        got=str(checkpoint),
        fix="check the path",
    )
