"""`streamrl diff RUN RUN`: the first step in which two runs part, and what parted, causes before what follows from them.

Fields of the jobs that differ come first, a line each. Then the first step that is not the same in both, a line for each kind of
difference in it: the initial model, the groups, then of the groups that both have the first sample whose versions, prompt, tokens,
log-probs or reward differ, the order in which groups came, the micro-steps, and the version that came out. Both runs need their whole archive.
Exit code 0: nothing differs; 1: something does; 2: a run cannot be read.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from streamrl.errors import EXIT_DONE, EXIT_FAULT, shorten
from streamrl.proto import stream_pb2 as pb
from streamrl_cli import console
from streamrl_cli.replaying.history import HistoryStep, RunHistory, read_history
from streamrl_cli.reporting.comparison import set_fields
from streamrl_workers.stream.packing import unpack_float32, unpack_int32

_SHOWN_CHARS = 16
"""Of a hash."""
_SHOWN_GROUPS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `streamrl diff`."""
    parser.add_argument("one", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("other", type=Path, metavar="RUN", help="another one")


def run(args: argparse.Namespace) -> int:
    """Print what differs."""
    one, other = read_history(args.one), read_history(args.other)
    fields, parting = list(differing_fields(one, other)), list(first_parting(one, other))
    console.out(*fields, *parting)
    if not parting:
        steps = min(len(one.steps), len(other.steps))
        ends = "" if len(one.steps) == len(other.steps) else f" ({len(one.steps)} and {len(other.steps)} are there)"
        console.out(f"the same in all {steps} steps of both{ends}")
    return EXIT_FAULT if fields or parting else EXIT_DONE


def differing_fields(one: RunHistory, other: RunHistory) -> Iterator[str]:
    """Of the jobs' specifications."""
    ours, theirs = set_fields(one.job.spec), set_fields(other.job.spec)
    for path in sorted(ours.keys() | theirs.keys()):
        if ours.get(path) != theirs.get(path):
            yield f"job: spec.{path}: {_field(ours, path)} | {_field(theirs, path)}"


def _field(fields: Mapping[str, str], path: str) -> str:
    return shorten(fields[path]) if path in fields else "not set"


def first_parting(one: RunHistory, other: RunHistory) -> Iterator[str]:
    """The first step that is not the same, a line for each kind of difference; nothing: all steps that both have are."""
    if line := _versions(one, other, version=0):
        yield f"before step 0: {line}"
        return
    for ours, theirs in zip(one.steps, other.steps, strict=False):
        causes = list(_step_differences(ours, theirs))
        if line := _versions(one, other, version=ours.step + 1):
            same = "" if causes else ": from the same samples, so another machine, release or setting has computed them"
            causes.append(f"{line}{same}")
        if causes:
            yield from (f"step {ours.step}: {cause}" for cause in causes)
            return


def _versions(one: RunHistory, other: RunHistory, *, version: int) -> str:
    ours, theirs = one.hash_of(version).hex(), other.hash_of(version).hex()
    differ = ours and theirs and ours != theirs
    return f"version {version} is {ours[:_SHOWN_CHARS]} | {theirs[:_SHOWN_CHARS]}" if differ else ""


def _step_differences(ours: HistoryStep, theirs: HistoryStep) -> Iterator[str]:
    left, right = ({group.head.group_id: group for group in step.groups} for step in (ours, theirs))
    if left.keys() != right.keys():
        yield f"groups {_listed(sorted(left.keys() - right.keys()))} | {_listed(sorted(right.keys() - left.keys()))}"
    pairs = ((left[number].read(), right[number].read()) for number in sorted(left.keys() & right.keys()))
    yield from sample_differences(
        (mine, its)
        for one, other in pairs
        for mine, its in zip(one.samples, other.samples, strict=False)  # as many, in jobs with groups of one size
    )
    if left.keys() == right.keys() and list(left) != list(right):
        yield f"groups came in the order {_listed(left)} | {_listed(right)}"
    if ours.micro_steps != theirs.micro_steps:
        yield f"micro-steps behind groups {_listed(ours.micro_steps)} | {_listed(theirs.micro_steps)}"
    if ours.cuts != theirs.cuts:
        yield f"passes were cut to the memory: {_cuts(ours.cuts)} | {_cuts(theirs.cuts)}"


def _cuts(cuts: pb.PassCuts) -> str:
    room = f"at most {cuts.room_tokens} tokens" if cuts.room_tokens else "not limited"
    return f"{room}, {len(cuts.halved)} in halves"


_READINGS: dict[str, Callable[[pb.Sample], Sequence[object]]] = {
    "version": lambda sample: ["-".join(map(str, dict.fromkeys(span.step for span in sample.spans)))],
    "prompt token": lambda sample: unpack_int32(sample.prompt_tokens),
    "token": lambda sample: unpack_int32(sample.tokens),
    "turn": lambda sample: [_turn(segment) for segment in sample.segments],
    "log-prob": lambda sample: unpack_float32(sample.logprobs),
    "reward": lambda sample: [sample.reward if sample.HasField("reward") else None],
}
"""What is compared of a sample, causes first. Of which attempt a version is follows from deaths, and is left out."""


def _turn(segment: pb.Segment) -> str:
    """What stands behind what, and what a turn earned by itself."""
    kind = "prompt of a context" if segment.context else "observation" if segment.observation else "turn"
    earned = f", reward {segment.reward:g}" if segment.HasField("reward") else ""
    return f"{kind} of {segment.tokens} tokens{earned}"


def sample_differences(pairs: Iterator[tuple[pb.Sample, pb.Sample]]) -> Iterator[str]:
    """For each kind the first sample in which it differs."""
    found: dict[str, str] = {}
    for ours, theirs in pairs:
        name = f"group {ours.group_id} sample {ours.sample_index}"
        for kind, read in _READINGS.items():
            if kind not in found and (line := _first(kind, read(ours), read(theirs))):
                found[kind] = f"{name}: {line}"
    yield from (found[kind] for kind in _READINGS if kind in found)


def _first(kind: str, ours: Sequence[object], theirs: Sequence[object]) -> str:
    for place, (mine, its) in enumerate(zip_longest(ours, theirs)):
        if mine != its:
            where = kind if len(ours) == len(theirs) == 1 else f"{kind} {place}"
            return f"{where} is {_value(mine)} | {_value(its)}"
    return ""


def _value(value: object) -> str:
    return "none" if value is None else str(value)


def _listed(numbers: Iterable[int]) -> str:
    shown = list(numbers)
    more = len(shown) - _SHOWN_GROUPS
    return (", ".join(map(str, shown[:_SHOWN_GROUPS])) or "none") + (f" and {more} more" if more > 0 else "")
