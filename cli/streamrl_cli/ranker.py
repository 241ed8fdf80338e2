"""`streamrl ranker`: fine-tunes a language model that orders prompts by the length of their completions, and judges it.

    ranker fit PAIRS.jsonl --model MODEL --out FOLDER     learn lengths; one prompt in five is held out (--all: none)
    ranker eval FOLDER PAIRS.jsonl                        recall of the longest, on the prompts that were held out

A line of PAIRS.jsonl is {"prompt": "..", "tokens": 123}; other fields are left alone, and lines with one prompt count as their mean. A run
with a ranker writes such a file: `RUN/ranker/pairs.jsonl`. FOLDER is what `path` in `scheduling.ranker.languageModel` names.

Owns the arguments, the file of pairs and what is printed. The model is `streamrl_workers.ranker`'s; it needs torch, imported when called.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from streamrl.errors import EXIT_DONE, UserError
from streamrl.files import parse_json, read_text
from streamrl_cli import console
from streamrl_workers.ranker.folder import RankerModel, check_folder, model_class
from streamrl_workers.scheduler.lengths import prompt_key
from streamrl_workers.scheduler.lengths.trust import LONGEST_PERCENT, measure

HELD_OUT_ONE_IN = 5
MIN_JUDGED = 20
"""Fewer prompts have hardly any longest ones."""
MOST_BYTES = 2**30
"""Of a file of pairs: it is read whole."""


class PromptLength(NamedTuple):
    """A prompt and how long its completions are, on average."""

    prompt: str
    tokens: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `streamrl ranker`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="fit|eval")
    fit = actions.add_parser("fit", help="learn lengths from pairs")
    fit.add_argument("pairs", type=Path, metavar="PAIRS.jsonl", help="prompts with tokens")
    fit.add_argument("--model", required=True, help="directory or hub name of a transformers model")
    fit.add_argument("--out", type=Path, required=True, help="folder to write")
    fit.add_argument("--all", action="store_true", help="learn from all prompts, hold none out")
    fit.add_argument("--passes", type=int, default=3, help="passes over the pairs (default: 3)")
    fit.add_argument("--learning-rate", type=float, default=2e-5, help="small models take more (default: 2e-5)")
    fit.add_argument("--batch", type=int, default=16, help="prompts in one step (default: 16)")
    fit.add_argument("--seed", type=int, default=0, help="seed of the order (default: 0)")
    judge = actions.add_parser("eval", help="how well a ranker finds the longest")
    judge.add_argument("folder", type=Path, metavar="FOLDER", help="what `ranker fit` wrote")
    judge.add_argument("pairs", type=Path, metavar="PAIRS.jsonl", help="prompts with tokens")
    judge.add_argument("--all", action="store_true", help="judge on all prompts, not on the held-out ones alone")


def run(args: argparse.Namespace) -> int:
    """Do what was asked."""
    {"fit": _fit, "eval": _eval}[args.action](args)
    return EXIT_DONE


def _fit(args: argparse.Namespace) -> None:
    for flag, value, least in (("--passes", args.passes, 1), ("--batch", args.batch, 1)):
        if value < least:
            raise UserError(field=flag, rule=f"must be at least {least}", got=value)
    if not args.learning_rate > 0:
        raise UserError(field="--learning-rate", rule="must be above 0", got=args.learning_rate)
    if args.out.is_file():
        raise UserError(field="--out", rule="must be a folder", got=str(args.out))
    pairs = read_pairs(args.pairs)
    learnt = [pair for pair in pairs if args.all or not is_held_out(pair.prompt)]
    held_out = [] if args.all else [pair for pair in pairs if is_held_out(pair.prompt)]
    if not learnt:
        rule = "must hold a prompt that is not held out"
        raise UserError(field=str(args.pairs), rule=rule, fix="add pairs, or --all")
    fitted: RankerModel = model_class(field="--model").fitted(
        learnt,
        model=args.model,
        passes=args.passes,
        learning_rate=args.learning_rate,
        batch_prompts=args.batch,
        seed=args.seed,
    )
    args.out.mkdir(parents=True, exist_ok=True)
    fitted.save(args.out)
    console.out(f"{args.out}: learnt from {len(learnt)} prompts")
    if len(held_out) >= MIN_JUDGED:
        _report(fitted, held_out, what="held out")


def _eval(args: argparse.Namespace) -> None:
    check_folder(args.folder, field="FOLDER")
    fitted: RankerModel = model_class(field="FOLDER").load(args.folder, field="FOLDER")
    judged = [pair for pair in read_pairs(args.pairs) if args.all or is_held_out(pair.prompt)]
    if len(judged) < MIN_JUDGED:
        rule = f"must have at least {MIN_JUDGED} {'' if args.all else 'held-out '}prompts"
        fix = "add pairs" if args.all else "add pairs, or --all if the ranker has not seen them"
        raise UserError(field=str(args.pairs), rule=rule, got=len(judged), fix=fix)
    _report(fitted, judged, what="all" if args.all else "held out")


def _report(fitted: RankerModel, pairs: Sequence[PromptLength], *, what: str) -> None:
    quality = measure(fitted.scores([pair.prompt for pair in pairs]), [pair.tokens for pair in pairs])
    correlation = "-" if quality.rank_correlation is None else f"{quality.rank_correlation:.2f}"
    console.out(f"prompts           {len(pairs)} ({what})")
    console.out(f"recall {LONGEST_PERCENT} %       {quality.recall:.2f} (95 %: at least {quality.recall_lower:.2f})")
    console.out(f"rank correlation  {correlation}")


def is_held_out(prompt: str) -> bool:
    """By the hash of the prompt: the same prompts are held out of every file."""
    return prompt_key(prompt) % HELD_OUT_ONE_IN == 0


def read_pairs(path: Path) -> list[PromptLength]:
    """Different prompts with their mean tokens, in the order of their first lines. Raises `UserError` for what is no pair."""
    tokens: dict[str, list[float]] = {}
    for number, line in enumerate(read_text(path, most_bytes=MOST_BYTES).split("\n"), start=1):
        if line.strip():
            prompt, count = _pair(line, place=f"{path} line {number}")
            tokens.setdefault(prompt, []).append(count)
    if not tokens:
        raise UserError(field=str(path), rule="must hold at least one line")
    return [PromptLength(prompt, sum(counts) / len(counts)) for prompt, counts in tokens.items()]


def _pair(line: str, *, place: str) -> PromptLength:
    try:
        record = parse_json(line)
    except ValueError as error:
        raise UserError(field=place, rule=f"must be JSON: {error}") from None
    if not isinstance(record, dict):
        raise UserError(field=place, rule="must be an object", got=record)
    prompt, count = record.get("prompt"), record.get("tokens")
    if not isinstance(prompt, str) or not prompt:
        raise UserError(field=place, rule="prompt must be a text that is not empty", got=prompt)
    if not prompt.isascii() and prompt.encode("utf-8", "replace").decode() != prompt:
        raise UserError(
            field=place, rule="prompt must be UTF-8, which cannot carry half of a surrogate pair", got=prompt
        )
    if isinstance(count, bool) or not isinstance(count, int | float) or not (math.isfinite(count) and count >= 0):
        raise UserError(field=place, rule="tokens must be a number of at least 0", got=count)
    return PromptLength(prompt, float(count))
