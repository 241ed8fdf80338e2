"""Rewards that look at the completion's text: `exactMatch`, `regex`, `mathVerify`."""

import functools
import logging
from typing import Any

from streamrl.spec.tasks.rewards import ExactMatchReward, MathVerifyReward, RegexReward
from streamrl_workers.rewards.base import Item, RewardContext, Scorer, compile_pattern, make_extract

REFERENCE_MARK = "####"
THOUGHT_END = "</think>"
_LATEX_MARKS = ("$", "\\boxed", "\\[", "\\(")
_REFERENCES_KEPT = 256
"""Samples of a group come close together and have the same reference."""


def exact_match(options: ExactMatchReward, *, context: RewardContext) -> Scorer:
    """1 if the extracted answer equals the reference after trimming both, else 0."""
    extract = make_extract(options.answer_pattern, field=f"{context.field}.answerPattern")
    fold = str.casefold if options.ignore_case else str

    def score(completion: str, item: Item) -> float:
        if item.answer is None:
            raise ValueError("this item has no reference answer; use the reward verifier")
        answer = extract(completion)
        return float(answer is not None and fold(answer.strip()) == fold(item.answer.strip()))

    return score


def regex(options: RegexReward, *, context: RewardContext) -> Scorer:
    """1 if the pattern is found anywhere in the completion, else 0."""
    search = compile_pattern(options.pattern, field=f"{context.field}.pattern").search

    def score(completion: str, item: Item) -> float:
        del item  # the pattern alone decides
        return float(search(completion) is not None)

    return score


def math_verify(options: MathVerifyReward, *, context: RewardContext) -> Scorer:
    """1 if the completion's mathematical answer equals the reference by the package math-verify, else 0.

    Reference: what follows the last `####` (as GSM8K writes it), else the whole answer; read as LaTeX or as an expression.
    Completion: what follows the last `</think>`, else all of it. Its answer is the last `\\boxed{...}`; without one other
    LaTeX (`$...$`, `\\(...\\)`), then the last number or plain expression. Several boxes side by side are a set.
    Equality is that of math-verify (https://github.com/huggingface/Math-Verify): 0.5 = 1/2, 1,234 = 1234, 50% = 0.5 and = 50,
    x + 1 = 1 + x, floats to six digits; units are dropped.
    Its own time limits use SIGALRM and are off: the pool ends what takes longer than the reward's `timeoutSeconds`.
    """
    del options, context  # has no options
    from math_verify import verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs every answer that it cannot read
    reference_of = functools.lru_cache(maxsize=_REFERENCES_KEPT)(_reference)
    reference_of("1")  # its grammar is built now, once for all forks

    def score(completion: str, item: Item) -> float:
        if item.answer is None:
            raise ValueError("this item has no reference answer")
        answer = _parse(completion.rpartition(THOUGHT_END)[2])
        return float(verify(list(reference_of(item.answer)), answer, timeout_seconds=None))

    return score


def _reference(answer: str) -> tuple[Any, ...]:
    """The reference as expressions of sympy; never empty."""
    text = answer.rpartition(REFERENCE_MARK)[2].strip().replace("\\$", "")
    marked = any(mark in text for mark in _LATEX_MARKS)
    parsed = _parse(text if marked else f"\\boxed{{{text}}}")
    if not parsed:
        raise ValueError(f"the reference answer cannot be read as mathematics: {answer!r}")
    return tuple(parsed)


def _parse(text: str) -> list[Any]:
    """Expressions of sympy; empty if nothing in the text can be read."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    # Boxes first: what else a completion holds are steps on the way.
    targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    parsed: list[Any] = parse(text, targets, fallback_mode="no_fallback", parsing_timeout=None)
    return parsed
