"""Rewards that look at the completion's text: `exactMatch`, `regex`, `mathVerify`."""

import functools
import logging
import math
import re
import sys
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from streamrl.spec.tasks.rewards import ExactMatchReward, MathVerifyReward, RegexReward
from streamrl_workers.rewards.base import Item, RewardContext, Scorer, compile_pattern, make_extract

REFERENCE_MARK = "####"
THOUGHT_END = "</think>"
_LATEX_MARKS = ("$", "\\boxed", "\\[", "\\(")
_REFERENCES_KEPT = 256
"""Samples of a group come close together and have the same reference."""
_SCIENTIFIC = re.compile(r"(?<![\w.\\])(?:\d+(?:\.\d*)?|\.\d+)[eE][+-]?\d{1,3}(?!\w|\.\d)")
"""A number as programs write it: `1e-05`."""
_DEGREES = re.compile(r"[°º˚](?:\s?[CF]\b)?(?!\s*\d)")
"""A sign of degrees; not that of `45°30'`."""
_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_DECIMALS, _SIGNIFICANT_DIGITS = 6, 3
"""To which floats are compared: the decimals of math-verify, or more where a small reference needs them."""


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
    LaTeX (`$...$`, `\\(...\\)`), then the last number or plain expression. Several boxes side by side are also read as a set.
    Equality is that of math-verify (https://github.com/huggingface/Math-Verify): 0.5 = 1/2, 1,234 = 1234, 50% = 0.5 and = 50,
    x + 1 = 1 + x, floats to six decimals and at least three digits; units and signs of degrees are dropped. `1e-05` is a number;
    a reference such as `2e-1` is also read as LaTeX, 2e - 1.
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
        reference = list(reference_of(item.answer))
        return float(
            any(
                verify(reference, _parse(_decimal(text)), float_rounding=_decimals(reference), timeout_seconds=None)
                for text in _readings(_plain(completion.rpartition(THOUGHT_END)[2]))
            )
        )

    return score


def _reference(answer: str) -> tuple[Any, ...]:
    """The reference as expressions of sympy; never empty."""
    text = _plain(answer.rpartition(REFERENCE_MARK)[2].strip().replace("\\$", ""))
    marked = any(mark in text for mark in _LATEX_MARKS)
    parsed = [one for written in dict.fromkeys((_decimal(text), text)) for one in _parse(written, boxed=not marked)]
    if not parsed:
        raise ValueError(f"the reference answer cannot be read as mathematics: {answer!r}")
    return tuple(parsed)


def _plain(text: str) -> str:
    """Signs that math-verify cannot read everywhere, as it can."""
    return _DEGREES.sub("", text.replace("\N{MINUS SIGN}", "-"))


def _decimal(text: str) -> str:
    """Numbers with an exponent written out: LaTeX has `e` for Euler's number."""
    return _SCIENTIFIC.sub(lambda found: f"{Decimal(found[0]):f}", text)


def _readings(text: str) -> list[str]:
    """The last box alone and, where there are several, the whole text."""
    boxes, opened = [], list[int | None]()
    for brace in _BRACES.finditer(text):
        if brace[0].startswith("\\boxed"):
            opened.append(brace.start())
        elif brace[0] == "{":
            opened.append(None)
        elif brace[0] == "}" and opened and (start := opened.pop()) is not None:
            boxes.append(text[start : brace.end()])
    return [boxes[-1], text] if len(boxes) > 1 else [text]


def _decimals(reference: Sequence[Any]) -> int:
    """How many decimals tell the reference from other numbers."""
    sizes = [abs(one) for one in reference if getattr(one, "is_Number", False)]
    small = [float(size) for size in sizes if sys.float_info.min < size < 1]
    return max([_DECIMALS, *(_SIGNIFICANT_DIGITS - 1 - math.floor(math.log10(size)) for size in small)])


def _parse(text: str, *, boxed: bool = False) -> list[Any]:
    """Expressions of sympy; empty if nothing in the text can be read. `boxed`: it is one, without its box."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    # Boxes first: what else a completion holds are steps on the way.
    targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    shown = f"\\boxed{{{text}}}" if boxed else text
    parsed: list[Any] = parse(shown, targets, fallback_mode="no_fallback", parsing_timeout=None)
    return parsed
