"""Rows as samples, as an engine would have made them: of texts, or of the token ids of a log. Owns which rows can be trained.

A text is the answer's tokens and its end (`answer_ends.py`), cut behind `maxTokens`. With `chat`, special tokens in it are text
(`stream/literals.py`). A log has the fields that `streamrl samples --json` writes, of samples with one turn or several:

    prompt_tokens   token ids
    tokens          token ids: turns of the model, and what it read in between
    segments        {tokens, observation, context, reward}, covering `tokens`: observations are read, not trained; contexts begin
                    anew; what a turn earned is a part of the row's reward. Absent or empty: one turn of the model
    finish_reason   "length": cut off
    resampled       true: a turn drawn anew, which is refused

What cannot be trained is an error with the row's place.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.errors import UserError
from streamrl.files import read_json
from streamrl.proto.literals import MARK
from streamrl.spec.task import SingleTask
from streamrl_workers.answer_ends import written_end
from streamrl_workers.answer_marks import AnswerText
from streamrl_workers.rewards.base import Item
from streamrl_workers.stream.literals import Literals
from streamrl_workers.stream.packing import count_32, pack_int32
from streamrl_workers.tasks.chat import load_fast_tokenizer, positions_of
from streamrl_workers.tasks.supervised.row_rewards import FIELD, REWARDS, is_reward
from streamrl_workers.tasks.values import Demonstration, SegmentKind, ShownSegment

if TYPE_CHECKING:
    from streamrl_workers.tasks.chat import FastTokenizer

DATASET_FIELD = "spec.task.dataset"


class Demonstrations:
    """What rows show, by one tokenizer."""

    def __init__(self, tokenizer: "FastTokenizer", *, task: SingleTask, positions: int | None, tokens: bool) -> None:
        """`positions`: of the model, prompt and answer together; None: any number. `tokens`: rows have token ids."""
        self._tokenizer = tokenizer
        self._positions = positions
        self._max_tokens = task.sampling.max_tokens
        self._special = task.chat is None  # a chat template has put them in
        self._literals = None if task.chat is None else Literals(tokenizer.backend_tokenizer)
        self._of_tokens = tokens
        self._end = written_end(tokenizer, chat=task.chat is not None)
        if not self._end:
            rule = "needs a tokenizer with an end token: where an answer ends is learned too"
            raise UserError(field=FIELD, rule=rule)
        self._texts = AnswerText(tokenizer, ends=self._end)

    def of(self, item: Item, *, place: str, reward: float, weight: float) -> Demonstration:
        """Of the item that stands at `place`. Raises `UserError` if it cannot be trained."""
        shown = self._logged(item, place=place) if self._of_tokens else self._said(item, place=place)
        self._check_positions(shown, place=place)
        return replace(shown, reward=reward, weight=weight)

    # ---- texts

    def _said(self, item: Item, *, place: str) -> Demonstration:
        if not (answer := item.target):
            fix = "leave it out, name answerField, or give spec.task.format a function that returns a target"
            raise UserError(field=DATASET_FIELD, rule=f"{place} has no answer to imitate", fix=fix)
        prompt = self._tokenized(item.prompt, special=self._special, place=place)
        if not prompt:
            raise UserError(field=DATASET_FIELD, rule=f"{place}: the prompt has no tokens", got=item.prompt)
        literal = answer if self._literals is None else self._literals.of_model(answer)
        said = self._tokenized(literal, special=False, place=place)
        tokens = [*said, *self._end][: self._max_tokens]
        text = answer if len(said) <= len(tokens) else self._texts.of(tokens)
        return Demonstration(
            prompt_tokens=pack_int32(prompt),
            tokens=pack_int32(tokens),
            segments=(ShownSegment(text=text, tokens=len(tokens), kind="turn"),),
            truncated=len(said) + len(self._end) > self._max_tokens,
        )

    def _tokenized(self, text: str, *, special: bool, place: str) -> Sequence[int]:
        try:
            if self._literals is not None and MARK in text:
                return self._literals.tokens(text)
            tokens: list[int] = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        except Exception as error:  # the tokenizers' Rust raises a bare one, as for a character that it does not know
            raise UserError(field=DATASET_FIELD, rule=f"{place} cannot be tokenized: {error}", got=text) from error
        return tokens

    # ---- token ids

    def _logged(self, item: Item, *, place: str) -> Demonstration:
        row = item.metadata
        if row.get("resampled"):
            rule = f"{place}: resampled must be false, since a turn drawn anew is no whole answer"
            raise UserError(field=DATASET_FIELD, rule=rule, got=True, fix="leave the row out")
        prompt, tokens = (self._ids(row, name, place=place) for name in ("prompt_tokens", "tokens"))
        if len(tokens) > self._max_tokens:
            rule = f"{place}: tokens must be at most {self._max_tokens}, which is spec.task.sampling.maxTokens"
            raise UserError(field=DATASET_FIELD, rule=rule, got=len(tokens), fix="raise it, or leave the row out")
        segments, begin = [], 0
        for count, kind, reward in _segments(row, tokens=len(tokens), place=place):
            text = self._texts.of(tokens[begin : begin + count])
            segments.append(ShownSegment(text=text, tokens=count, kind=kind, reward=reward))
            begin += count
        return Demonstration(
            prompt_tokens=pack_int32(prompt),
            tokens=pack_int32(tokens),
            segments=tuple(segments),
            truncated=row.get("finish_reason") == "length",
        )

    def _ids(self, row: Mapping[str, Any], name: str, *, place: str) -> list[int]:
        ids, size = row.get(name), len(self._tokenizer)
        if not isinstance(ids, list) or not ids or not all(type(one) is int and 0 <= one < size for one in ids):
            rule = (
                f"{place}: {name} must be a list of token ids from 0 to {size - 1}, as this model's tokenizer has them"
            )
            raise UserError(field=DATASET_FIELD, rule=rule, got=ids)
        return ids

    # ---- both

    def _check_positions(self, shown: Demonstration, *, place: str) -> None:
        """Of each context: what the model saw as a whole."""
        if self._positions is None:
            return
        read, said = count_32(shown.prompt_tokens), 0
        for segment in (*shown.segments, ShownSegment(text="", tokens=0, kind="context")):
            if segment.kind != "context":
                said += segment.tokens
                continue
            if read + said > self._positions:
                rule = f"{place}: prompt and answer must have at most {self._positions} tokens, the model's positions"
                fix = "leave it out or lower spec.task.sampling.maxTokens"
                raise UserError(field=DATASET_FIELD, rule=rule, got=f"{read} + {said}", fix=fix)
            read, said = segment.tokens, 0


def _segments(row: Mapping[str, Any], *, tokens: int, place: str) -> list[tuple[int, SegmentKind, float | None]]:
    """(tokens, kind, reward) of each. Raises `UserError`: they do not cover the tokens, or nothing is trained."""
    found: list[tuple[int, SegmentKind, float | None]] = []
    for segment in row.get("segments") or [{"tokens": tokens}]:
        match segment:
            case {"tokens": int(count), "context": True} if count >= 0:
                found.append((count, "context", None))
            case {"tokens": int(count), "observation": True} if count >= 0:
                found.append((count, "observation", None))
            case {"tokens": int(count), "reward": reward} if count >= 0 and is_reward(reward):
                found.append((count, "turn", float(reward)))
            case {"tokens": int(count)} if count >= 0 and segment.get("reward") is None:
                found.append((count, "turn", None))
            case _:
                rule = f"{place}: each of segments must be an object with tokens, a number, and reward, if any, one {REWARDS}"
                raise UserError(field=DATASET_FIELD, rule=rule, got=segment)
    if (0, "context", None) in found:
        rule = f"{place}: segments with a context must have tokens, since the model answers them"
        raise UserError(field=DATASET_FIELD, rule=rule, got=0)
    if (covered := sum(count for count, _, _ in found)) != tokens:
        rule = f"{place}: segments must cover the {tokens} tokens"
        raise UserError(field=DATASET_FIELD, rule=rule, got=covered)
    if not any(count for count, kind, _ in found if kind == "turn"):
        rule = f"{place}: segments must hold tokens of the model, and all are observations"
        raise UserError(field=DATASET_FIELD, rule=rule, fix="leave the row out")
    return found


def open_demonstrations(task: SingleTask, *, model_path: str, tokens: bool) -> Demonstrations:
    """By the model in the directory. Raises `UserError` if it has no tokenizer for this."""
    tokenizer = load_fast_tokenizer(model_path, field=FIELD)
    positions = positions_of(read_json(Path(model_path) / "config.json"))
    return Demonstrations(tokenizer, task=task, positions=positions, tokens=tokens)
