"""A run as a trace for Perfetto, from its run folder: bubbles of each process, steps, versions, samples.

Owns what of the folder becomes which span. Does not own the file's format (`chrome_trace.py`).

What a process does is known in whole seconds (`metrics/bubbles.py`): how long it did what, not in which order. So the spans of a second follow
each other, the one that the second before ended with first; sums by cause are exact, places within a second are not. A sample's span ends when
the scheduler had all its tokens, and is as long as its generator worked on it; with an environment the turns are drawn as one.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from streamrl import keys
from streamrl.proto import stream_pb2 as pb
from streamrl_cli.reporting.chrome_trace import OWN_TRACK, ChromeTrace
from streamrl_cli.reporting.data import STEP, records, wall_lines
from streamrl_cli.reporting.walls import Growth, growth
from streamrl_cli.runner.folder import RunFolder
from streamrl_workers.metrics.bubbles import PARTS
from streamrl_workers.scheduler.journal.sample_store import open_samples
from streamrl_workers.stream.segments import completion_tokens

MOST_SAMPLES = 200_000
"""The newest: more than that a browser does not draw."""
_SHORTEST_S = 1e-6
_JITTER_S = 0.05
"""Lines of one process follow each other: what lies between two is how exactly their times were taken."""
_STEP_TRACK = 1
_TRAINER = "trainer-0"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTrace:
    """What there is, and what it leaves out."""

    trace: ChromeTrace
    samples: int
    left_out: int
    """Samples without a time (of an earlier release), or older than the newest `MOST_SAMPLES`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    begun_s: float
    ended_s: float
    sample: pb.Sample
    step: int | None


def run_trace(folder: RunFolder) -> RunTrace:
    """The trace of a run, also while it goes on.

    Raises:
        UserError: a file of the folder cannot be read, or is not what was written.
    """
    trace = ChromeTrace()
    walls = {name: growth(lines) for name, lines in wall_lines(folder).items()}
    zero_s = min((grown[0][0] for grown in walls.values()), default=0.0)
    for process, grown in walls.items():
        trace.name_track(process, OWN_TRACK, "busy or bubble")
        for part, begun_s, ended_s in phases(grown):
            trace.span(process, part, begun_s=begun_s - zero_s, seconds=ended_s - begun_s)
    _draw_steps(trace, folder, zero_s=zero_s)
    drawn, left_out = _samples(folder)
    _draw_samples(trace, drawn, zero_s=zero_s)
    return RunTrace(trace=trace, samples=len(drawn), left_out=left_out)


def _draw_steps(trace: ChromeTrace, folder: RunFolder, *, zero_s: float) -> None:
    """A step ends with its record in the journal; the trainer has begun the next one a little before."""
    trace.name_track(_TRAINER, _STEP_TRACK, "steps")
    last_s = -zero_s
    for line in records(folder.file(keys.DIR_METRICS) / "steps.jsonl", STEP, beneath=folder.path):
        if "time_s" not in line:
            continue
        took_s, at_s = line.get("trainer", {}).get("step_seconds") or 0.0, line["time_s"] - zero_s
        begun_s = min(at_s, max(last_s, at_s - took_s))
        trace.span(
            _TRAINER,
            f"step {line['step']}",
            begun_s=begun_s,
            seconds=at_s - begun_s,
            track=_STEP_TRACK,
            reward=line["reward_mean"],
        )
        trace.instant(_TRAINER, f"version {line['step'] + 1}", at_s=at_s, track=_STEP_TRACK)
        last_s = at_s


def phases(grown: Sequence[Growth]) -> Iterator[tuple[str, float, float]]:
    """(part, begin, end) of what a process did, in order; equal neighbours are one."""
    last: tuple[str, float, float] | None = None
    for from_s, _, parts in grown:
        before, ended_s = ("", -math.inf) if last is None else (last[0], last[2])
        at_s = ended_s if abs(from_s - ended_s) < _JITTER_S else max(from_s, ended_s)
        for part in sorted((part for part in PARTS if parts.get(part, 0.0) > 0), key=lambda part: part != before):
            begun_s = at_s
            at_s += parts[part]
            if last is not None and (last[0], last[2]) == (part, begun_s):
                last = (part, last[1], at_s)
                continue
            if last is not None:
                yield last
            last = (part, begun_s, at_s)
    if last is not None:
        yield last


def _samples(folder: RunFolder) -> tuple[list[_Drawn], int]:
    """Those that have a time, and how many are left out."""
    if not folder.file(keys.FILE_JOURNAL).exists():
        return [], 0
    found: list[_Drawn] = []
    untimed = 0
    with open_samples(folder.path) as store:
        for group in store.groups():
            step = group.head.step if group.head.HasField("step") else None
            for sample in group.read().samples:
                if not sample.HasField("ended_at"):
                    untimed += 1
                    continue
                begun_s = sample.ended_at - max(sample.generate_s, _SHORTEST_S)
                found.append(_Drawn(begun_s=begun_s, ended_s=sample.ended_at, sample=sample, step=step))
    found.sort(key=lambda one: one.ended_s)
    newest = found[-MOST_SAMPLES:]
    return newest, untimed + len(found) - len(newest)


def _draw_samples(trace: ChromeTrace, drawn: Sequence[_Drawn], *, zero_s: float) -> None:
    """Begins and ends in the order of time, so that slots are what they were."""
    instants = [(one.begun_s, True, one) for one in drawn] + [(one.ended_s, False, one) for one in drawn]
    for at_s, begins, one in sorted(instants, key=lambda instant: instant[:2]):
        sample = one.sample
        key = (sample.group_id, sample.sample_index)
        if begins:
            trace.began(sample.generator_id, key, now_s=at_s - zero_s)
            continue
        trace.ended(
            sample.generator_id,
            key,
            tokens=completion_tokens(sample),
            now_s=at_s - zero_s,
            reward=sample.reward if sample.HasField("reward") else None,
            versions=[span.step for span in sample.spans],
            step=one.step,
        )
