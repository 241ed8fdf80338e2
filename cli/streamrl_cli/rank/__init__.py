"""`streamrl rank`: fits, applies and judges a predictor of completion lengths, without a run.

    rank pairs MODEL PROMPTS.jsonl --out PAIRS.jsonl    measure lengths: let a model complete each prompt
    rank fit PAIRS.jsonl --ranker hashing --out FILE    learn them; one prompt in five is held out (--all: none)
    rank eval FILE PAIRS.jsonl                          recall of the longest, on the prompts that were held out
    rank score FILE PROMPTS.jsonl [--out SCORES]        scores, the longest first; SCORES for `scheduling.ranker.scores`

A line of PAIRS.jsonl is {"prompt": "..", "tokens": 123}, of PROMPTS.jsonl {"prompt": ".."}; other fields are left alone. A prompt is
the text that the model reads. Several lines with one prompt count as their mean. A file of the ranker `hashing`, and a folder of
`languageModel` or `policyFeatures`, is what `path` in `scheduling.ranker` names.

Owns the arguments and what is printed. Rankers that need torch import it when they are asked for.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from streamrl.errors import EXIT_DONE, UserError
from streamrl_cli import console
from streamrl_cli.rank.fitted import FitOptions
from streamrl_cli.rank.offline import FITTERS, fit, open_fitted, save_scores
from streamrl_cli.rank.pairs import Pair, is_held_out, read_pairs, read_prompts, write_pairs

MIN_JUDGED = 20
"""Fewer prompts have no longest 5 %."""
_SHOWN_CHARS = 80


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `streamrl rank`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="pairs|fit|eval|score")
    _add_pairs(actions.add_parser("pairs", help="measure lengths: let a model complete each prompt"))
    _add_fit(actions.add_parser("fit", help="learn lengths from pairs"))
    judge = actions.add_parser("eval", help="how well a ranker finds the longest")
    judge.add_argument("file", type=Path, help="what `rank fit` wrote")
    judge.add_argument("pairs", type=Path, metavar="PAIRS.jsonl", help="prompts with tokens")
    judge.add_argument("--all", action="store_true", help="judge on all prompts, not on the held-out ones alone")
    score = actions.add_parser("score", help="score prompts")
    score.add_argument("file", type=Path, help="what `rank fit` wrote")
    score.add_argument("prompts", type=Path, metavar="PROMPTS.jsonl", help="prompts")
    score.add_argument("--out", type=Path, help="write a file for scheduling.ranker.scores instead of printing")


def _add_pairs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, help="a run folder, or a directory with config.json")
    parser.add_argument("prompts", type=Path, metavar="PROMPTS.jsonl", help="prompts")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--samples", type=int, default=1, help="completions of each prompt (default: 1)")
    parser.add_argument("--max-tokens", type=int, default=1024, help="longest completion in tokens (default: 1024)")
    parser.add_argument("--temperature", type=float, default=1.0, help="of sampling (default: 1)")
    parser.add_argument("--slots", type=int, default=64, help="completions at once (default: 64)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the samples (default: 0)")


def _add_fit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pairs", type=Path, metavar="PAIRS.jsonl", help="prompts with tokens")
    parser.add_argument("--ranker", choices=list(FITTERS), default="hashing", help="default: hashing")
    parser.add_argument("--out", type=Path, required=True, help="file to write; a folder for rankers with a model")
    parser.add_argument("--all", action="store_true", help="learn from all prompts, hold none out")
    parser.add_argument("--model", default="", help="transformers model, for languageModel and policyFeatures")
    parser.add_argument("--passes", type=int, default=None, help="passes over the pairs (default: the ranker's own)")
    parser.add_argument("--learning-rate", type=float, default=None, help="of languageModel (default: 2e-5)")
    parser.add_argument("--batch", type=int, default=16, help="prompts in one step of a model (default: 16)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Do what was asked."""
    {"pairs": _pairs, "fit": _fit, "eval": _eval, "score": _score}[args.action](args)
    return EXIT_DONE


def _pairs(args: argparse.Namespace) -> None:
    for flag, value in (("--samples", args.samples), ("--max-tokens", args.max_tokens), ("--slots", args.slots)):
        _check_at_least_one(flag, value)
    if args.temperature < 0:
        raise UserError(field="--temperature", rule="must be at least 0", got=args.temperature)
    prompts = read_prompts(args.prompts)
    from streamrl_cli.rank.sampling import Sampler

    sampler = Sampler(
        args.model, slots=args.slots, max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed
    )
    write_pairs(args.out, sampler.pairs(prompts, samples=args.samples))
    console.out(f"{args.out}: {len(prompts) * args.samples} pairs of {len(prompts)} prompts")


def _fit(args: argparse.Namespace) -> None:
    if args.passes is not None:
        _check_at_least_one("--passes", args.passes)
    _check_at_least_one("--batch", args.batch)
    if args.learning_rate is not None and not args.learning_rate > 0:
        raise UserError(field="--learning-rate", rule="must be above 0", got=args.learning_rate)
    pairs = read_pairs(args.pairs)
    held_out = [] if args.all else [pair for pair in pairs if is_held_out(pair.prompt)]
    learnt = pairs if args.all else [pair for pair in pairs if not is_held_out(pair.prompt)]
    if not learnt:
        raise UserError(
            field=str(args.pairs), rule="must hold a prompt that is not held out", fix="add pairs, or --all"
        )
    options = FitOptions(
        model=args.model,
        passes=args.passes,
        learning_rate=args.learning_rate,
        batch_prompts=args.batch,
        seed=args.seed,
    )
    fitted = fit(args.ranker, learnt, options=options)
    fitted.save(args.out)
    console.out(f"{args.out}: {args.ranker}, learnt from {len(learnt)} prompts")
    if len(held_out) >= MIN_JUDGED:
        _report(fitted.scores([pair.prompt for pair in held_out]), held_out, what="held out")


def _eval(args: argparse.Namespace) -> None:
    fitted = open_fitted(args.file)
    pairs = read_pairs(args.pairs)
    judged = pairs if args.all else [pair for pair in pairs if is_held_out(pair.prompt)]
    if len(judged) < MIN_JUDGED:
        rule = f"must have at least {MIN_JUDGED} {'' if args.all else 'held-out '}prompts"
        fix = "add pairs" if args.all else "add pairs, or --all if the ranker has not seen them"
        raise UserError(field=str(args.pairs), rule=rule, got=len(judged), fix=fix)
    _report(fitted.scores([pair.prompt for pair in judged]), judged, what="all" if args.all else "held out")


def _report(scores: Sequence[float], pairs: Sequence[Pair], *, what: str) -> None:
    from streamrl_workers.scheduler.lengths.quality import measure, ranks

    quality = measure(ranks(scores), [pair.tokens for pair in pairs])
    correlation = "-" if quality.rank_correlation is None else f"{quality.rank_correlation:.2f}"
    console.out(f"prompts           {len(pairs)} ({what})")
    for percent, recall in quality.recall.items():
        console.out(f"recall {percent:>2} %       {recall.value:.2f} (95 %: at least {recall.lower:.2f})")
    console.out(f"rank correlation  {correlation}")
    console.out(f"calibration       {quality.calibration:.2f} (mean distance of places)")


def _score(args: argparse.Namespace) -> None:
    fitted = open_fitted(args.file)
    prompts = read_prompts(args.prompts)
    scores = fitted.scores(prompts)
    if args.out is not None:
        save_scores(args.out, dict(zip(prompts, scores, strict=True)))
        console.out(f"{args.out}: scores of {len(prompts)} prompts")
        return
    for score, prompt in sorted(zip(scores, prompts, strict=True), key=lambda pair: -pair[0]):
        console.out(f"{score:9.3f}  {' '.join(prompt.split())[:_SHOWN_CHARS]}")


def _check_at_least_one(flag: str, value: int) -> None:
    if value < 1:
        raise UserError(field=flag, rule="must be at least 1", got=value)
