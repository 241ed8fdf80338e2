"""Picks samples of a run to look at, and says what is known of each. Owns no reading of files, and no layout."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from streamrl.errors import UserError
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.journal.sample_store import SamplePlace, StoredGroup, open_samples
from streamrl_workers.stream.packing import unpack_float32, unpack_int32
from streamrl_workers.stream.sample_choice import FAILED, choose
from streamrl_workers.stream.segments import completion_tokens

_MOST_LOOKED_AT = 100_000
"""Groups that one search goes over, at some 5 µs each."""
_MOST_READ_BYTES = 32 * 2**20
"""Samples that one search reads, before they were compressed: some tenths of a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSample:
    """A sample with all that is known of it."""

    kinds: tuple[str, ...]
    """Why it was picked."""
    group: pb.ArchivedGroup
    sample: pb.Sample
    prompt: str
    written: pb.SampleTexts
    answer: str | None = None
    """The reference answer that the reward saw."""
    metadata: str = ""
    """What else the reward saw of the item: JSON, cut where it is very long; empty: nothing."""

    @property
    def reward(self) -> float | None:
        """Its reward, if it has one."""
        return self.sample.reward if self.sample.HasField("reward") else None

    @property
    def advantage(self) -> float | None:
        """What the trainer made of it, if it was trained and its trainer says so."""
        place = 4 * self.sample.sample_index
        data = self.group.advantages[place : place + 4]
        value = unpack_float32(data)[0] if len(data) == 4 else math.nan  # noqa: PLR2004 - of a float32
        return None if math.isnan(value) else value

    @property
    def fate(self) -> str:
        """What became of it."""
        if self.group.HasField("step"):
            return f"step {self.group.step}"
        return f"dropped ({self.group.drop_reason})" if self.group.drop_reason else "not trained yet"

    def title(self) -> str:
        """Why it is shown, and which it is."""
        kinds = f"{', '.join(self.kinds)}: " if self.kinds else ""
        return f"{kinds}{self.fate}, group {self.group.group_id}, sample {self.sample.sample_index}"

    def facts(self) -> str:
        """Its numbers on a line."""
        sample = self.sample
        parts = ", ".join(f"{name} {value:g}" for name, value in sorted(sample.reward_parts.items()))
        why = "a turn drawn anew" if sample.resampled else sample.reward_error
        reward = f"no reward ({why})" if self.reward is None else f"reward {self.reward:g}"
        told = [f"{reward}{f' ({parts})' if len(sample.reward_parts) > 1 else ''}"]
        told += [why] if why and self.reward is not None else []
        told += [] if self.advantage is None else [f"advantage {self.advantage:+.3g}"]
        told.append(f"{completion_tokens(sample)} tokens, ended by {sample.finish_reason or 'nothing'}")
        versions = sorted({span.step for span in sample.spans})
        told.append(
            f"version {'-'.join(map(str, dict.fromkeys((versions[0], versions[-1]))))}" if versions else "no version"
        )
        return ", ".join(told) + f", by {sample.generator_id or 'nobody'} in {sample.generate_s:.3g} s"

    def texts(self) -> Iterator[tuple[str, str]]:
        """(whose, text), in their order."""
        if self.prompt:
            yield "prompt", self.prompt
        for place, (turn, answer) in enumerate(
            zip_longest(self.written.turns, self.written.observations, fillvalue="")
        ):
            yield "completion", turn
            if answer:
                yield "new prompt" if place in self.written.contexts else "environment", answer
        if self.answer is not None:
            yield "reference", self.answer
        if self.metadata:
            yield "metadata", self.metadata

    def document(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        sample, group = self.sample, self.group
        return {
            "kinds": list(self.kinds),
            "group": group.group_id,
            "sample": sample.sample_index,
            "step": group.step if group.HasField("step") else None,
            "attempt": group.attempt if group.HasField("step") else None,
            "dropped": group.drop_reason or None,
            "prompt_index": group.prompt_index,
            "prompt": self.prompt,
            "turns": list(self.written.turns),
            **({"completion": self.written.turns[0]} if len(self.written.turns) == 1 else {}),
            "observations": list(self.written.observations),
            "contexts": list(self.written.contexts),
            "answer": self.answer,
            "metadata": _json_or_text(self.metadata),
            "reward": _number(self.reward),
            "reward_parts": {name: _number(value) for name, value in sorted(sample.reward_parts.items())},
            "reward_error": sample.reward_error or None,
            "resampled": sample.resampled,
            "advantage": _number(self.advantage),
            "finish_reason": sample.finish_reason,
            "generator": sample.generator_id,
            "generate_s": _number(sample.generate_s),
            "spans": [{"tokens": span.tokens, "attempt": span.attempt, "step": span.step} for span in sample.spans],
            "segments": [
                {
                    "tokens": segment.tokens,
                    "observation": segment.observation,
                    "context": segment.context,
                    "reward": _number(segment.reward if segment.HasField("reward") else None),
                }
                for segment in sample.segments
            ],
            "prompt_tokens": unpack_int32(sample.prompt_tokens).tolist(),
            "tokens": unpack_int32(sample.tokens).tolist(),
            "logprobs": [_number(value) for value in unpack_float32(sample.logprobs)],
        }


def _json_or_text(text: str) -> Any:  # noqa: ANN401 - JSON
    """Return what the text says; the text itself where it was cut."""
    try:
        return json.loads(text, parse_constant=str) if text else {}
    except (ValueError, RecursionError):
        return text


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Samples to look at."""

    samples: tuple[ShownSample, ...]
    left_out: int
    """Groups that the archive was to have, and has not."""
    unread: int = 0
    """Groups in which the text was not looked for, since that is too much at once."""


def of_group(run_dir: Path, *, group_id: int) -> Found:
    """All samples of one group. Raises `UserError`: there are none, or the run folder cannot be believed."""
    with open_samples(run_dir) as store:
        group = next((group for group in store.groups() if group.head.group_id == group_id), None)
        if group is None:
            raise UserError(
                field=f"group {group_id}",
                rule="has no samples in this run folder",
                fix=f"`streamrl journal show {run_dir} {group_id}` tells its life",
            )
        samples = tuple(_shown(group, index, kinds=()) for index in range(len(group.head.samples)))
        return Found(samples=samples, left_out=store.account.left_out)


def of_run(run_dir: Path) -> Iterator[ShownSample]:
    """All samples that steps have consumed, one group in memory at a time. Raises `UserError`: the run folder cannot be believed."""
    with open_samples(run_dir) as store:
        for group in store.groups():
            if group.head.HasField("step"):
                yield from (_shown(group, index, kinds=()) for index in range(len(group.head.samples)))


def of_step(run_dir: Path, *, step: int | None, kinds: Sequence[str], count: int, text: str = "") -> Found:
    """Samples of a step that have a text; None: of the newest step that has some. Raises `UserError`: as `of_group`."""
    with open_samples(run_dir) as store:
        groups: list[StoredGroup] = []
        first, newest = None, None
        for group in store.groups():
            if not group.head.HasField("step"):
                continue
            at = group.head.step
            first, newest = at if first is None else min(first, at), at if newest is None else max(newest, at)
            if step is None and groups and at > groups[0].head.step:
                groups.clear()
            if at == (newest if step is None else step):
                groups.append(group)
        if not groups:
            known = "no step has any yet" if first is None else f"there are samples of steps {first} to {newest}"
            raise UserError(
                field=f"step {step}" if step is not None else str(run_dir), rule="has no samples", fix=known
            )
        reader = _TextReader(SampleQuery(text=text))
        samples = _picked(groups, kinds=kinds, count=count, takes=reader.has_text)
        return Found(samples=samples, left_out=store.account.left_out, unread=len(reader.unread))


def of_dropped(run_dir: Path, *, kinds: Sequence[str], count: int) -> Found:
    """Samples of groups that were dropped when they had been scored. Raises `UserError`: as `of_group`."""
    with open_samples(run_dir) as store:
        groups = [group for group in store.groups() if group.head.drop_reason]
        if not groups:
            raise UserError(field="--dropped", rule="finds none", fix="no dropped group of this run has samples")
        return Found(samples=_picked(groups, kinds=kinds, count=count), left_out=store.account.left_out)


def of_failed(run_dir: Path, *, count: int) -> Found:
    """Return the newest samples whose score failed, of all steps and dropped groups. Raises `UserError`: as `of_group`."""
    found: list[ShownSample] = []
    before: SamplePlace | None = None
    while len(found) < count:
        part = search(run_dir, SampleQuery(failed=True), before=before, count=count - len(found))
        found += [replace(sample, kinds=(FAILED,)) for sample in part.samples]
        if (before := part.next_place) is None:
            break
    if not found:
        raise UserError(
            field=f"--kind {FAILED}", rule="finds none", fix="no kept sample of this run has a failed score"
        )
    return Found(samples=tuple(found[:count]), left_out=part.left_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleQuery:
    """Which samples a search is for."""

    text: str = ""
    """In prompt, completion or an answer of the environment, in upper or lower case."""
    step: int | None = None
    dropped: bool = False
    """Only of groups that were dropped."""
    failed: bool = False
    """Only those whose score failed."""

    def takes(self, head: pb.ArchivedGroup) -> bool:
        """Whether a group may have some."""
        if self.dropped and not head.drop_reason:
            return False
        if self.failed and not any(sample.failed for sample in head.samples):
            return False
        return self.step is None or (head.HasField("step") and head.step == self.step)

    def matches(self, sample: ShownSample) -> bool:
        """Whether its score failed where that is asked for, and one of its texts has the text."""
        if self.failed and not sample.sample.reward_error:
            return False
        wanted = self.text.casefold()
        return not wanted or any(wanted in text.casefold() for _, text in sample.texts())


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What was found in a part of the samples, newest first."""

    samples: tuple[ShownSample, ...]
    left_out: int
    """Groups that the archive was to have, and has not."""
    looked_at: int
    """Groups that this search has gone over."""
    next_place: SamplePlace | None
    """From where to go on; None: that was all."""


def search(run_dir: Path, query: SampleQuery, *, before: SamplePlace | None, count: int) -> SearchResult:
    """About `count` samples, groups whole, newest first; fewer where many had to be looked at. Raises `UserError`: as `of_group`."""
    found: list[ShownSample] = []
    looked_at = read_bytes = 0
    place: SamplePlace | None = None
    with open_samples(run_dir) as store:
        for group in store.newest(before=before):
            if len(found) >= count or looked_at >= _MOST_LOOKED_AT or read_bytes >= _MOST_READ_BYTES:
                return SearchResult(
                    samples=tuple(found), left_out=store.account.left_out, looked_at=looked_at, next_place=place
                )
            looked_at, place = looked_at + 1, group.place
            if not query.takes(group.head):
                continue
            stored = group.read()
            read_bytes += stored.ByteSize()
            shown = (_of_stored(group, stored, index, kinds=()) for index in range(len(stored.samples)))
            found += [sample for sample in shown if query.matches(sample)]
        return SearchResult(samples=tuple(found), left_out=store.account.left_out, looked_at=looked_at, next_place=None)


class _TextReader:
    """Looks for a text; reads each group once, and no more than one search may."""

    def __init__(self, query: SampleQuery) -> None:
        self.unread: set[int] = set()
        """Ids of the groups that would have been too much."""
        self._query = query
        self._left_bytes = _MOST_READ_BYTES
        self._read: dict[int, pb.ArchivedSamples] = {}

    def has_text(self, group: StoredGroup, index: int) -> bool:
        """Whether a sample has it."""
        if not self._query.text:
            return True
        group_id = group.head.group_id
        if group_id not in self._read:
            if self._left_bytes <= 0:
                self.unread.add(group_id)
                return False
            stored = self._read[group_id] = group.read()
            self._left_bytes -= stored.ByteSize()
        return self._query.matches(_of_stored(group, self._read[group_id], index, kinds=()))


def _picked(
    groups: Iterable[StoredGroup],
    *,
    kinds: Sequence[str],
    count: int,
    takes: Callable[[StoredGroup, int], bool] = lambda group, index: True,
) -> tuple[ShownSample, ...]:
    """Of each kind so many; one that is of several kinds comes once."""
    chosen = choose(groups, kinds=kinds, count=count, takes=takes)
    return tuple(_shown(group, index, kinds=why) for group, index, why in chosen)


def _shown(group: StoredGroup, index: int, *, kinds: tuple[str, ...]) -> ShownSample:
    return _of_stored(group, group.read(), index, kinds=kinds)


def _of_stored(group: StoredGroup, stored: pb.ArchivedSamples, index: int, *, kinds: tuple[str, ...]) -> ShownSample:
    texts = stored.texts.samples
    return ShownSample(
        kinds=kinds,
        group=group.head,
        sample=stored.samples[index],
        prompt=stored.texts.prompt,
        written=texts[index] if index < len(texts) else pb.SampleTexts(),
        answer=stored.texts.answer if stored.texts.HasField("answer") else None,
        metadata=stored.texts.metadata,
    )
