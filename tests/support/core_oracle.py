"""What the core has said in ten worlds, in a form that a refactoring keeps: names of classes and fields are mapped in one table.

`python -m support.core_oracle check` (in `tests/`) compares every world with `core_oracle.json`; `write` writes that file anew; `dump FOLDER`
writes the effects of each world as text, one a line, so that two trees can be compared by `diff`.
"""

import base64
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from streamrl.mixture import Mixture
from streamrl.proto import stream_pb2 as pb
from streamrl.spec.scheduling import Rebalance, SkewAware
from streamrl_workers.metrics.step_times import StepCounts, bucket_of
from streamrl_workers.scheduler.dispatch.speeds import MIN_STEPS
from streamrl_workers.scheduler.settings import SchedulerSettings, TaskSettings
from support.core_peers import SimGenerator
from support.core_world import World, settings
from support.known_lengths import KnownLengths

PLACE = Path(__file__).with_suffix(".json")
NAMES: Mapping[str, str] = MappingProxyType({})
"""Today's name of an effect, a record or one of their fields -> the name under which the file has it."""
PORTION = 100
"""Effects of one hash: the first that differs says where to look."""
_SERIALIZED = MappingProxyType({"trajectories": pb.Sample, "texts": pb.GroupTexts})
"""Fields with serialized messages."""


def canonical(value: Any) -> Any:
    """The value as JSON would have it, by the names of the table."""
    if isinstance(value, Enum):
        return canonical(value.value)
    if is_dataclass(value):
        found = {one.name: _field(one.name, getattr(value, one.name)) for one in fields(value)}
        return {"is": _name(type(value).__name__), **{_name(name): found[name] for name in sorted(found)}}
    if isinstance(value, Message):
        return _renamed(MessageToDict(value, preserving_proto_field_name=True))
    if isinstance(value, bytes | bytearray):
        return base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return {str(key): canonical(value[key]) for key in sorted(value)}
    if isinstance(value, frozenset | set):
        return sorted(map(canonical, value))
    if isinstance(value, tuple | list):
        return [canonical(one) for one in value]
    return value


def _field(name: str, value: Any) -> Any:
    if (kind := _SERIALIZED.get(name)) is None:
        return canonical(value)
    many = value if isinstance(value, tuple) else (value,)
    return [canonical(kind.FromString(one)) for one in many]


def _renamed(value: Any) -> Any:
    if isinstance(value, dict):
        return {_name(name): _renamed(one) for name, one in value.items()}
    return [_renamed(one) for one in value] if isinstance(value, list) else value


def _name(name: str) -> str:
    return NAMES.get(name, name)


class Recorded(World):
    """A world that keeps what its core says."""

    def __init__(self, job: SchedulerSettings, **parts: Any) -> None:
        self.said: list[str] = []
        self.trains = True
        """Whether the trainer computes in this turn."""
        super().__init__(job, **parts)

    def do(self, effects: list[Any]) -> None:
        self.said += [json.dumps(canonical(effect), sort_keys=True) for effect in effects]
        super().do(effects)

    def can_take_step(self) -> bool:
        return self.trains and super().can_take_step()

    def make_token(self, generator: SimGenerator, lease: int, *, finish: str) -> None:
        request = generator.active[lease]
        left = request.sampling.max_tokens - (len(request.prefix_tokens) >> 2) + request.context_tokens
        super().make_token(generator, lease, finish=finish or ("length" if left <= 1 else ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """One world: its job, who is there, and what goes wrong."""

    job: Mapping[str, Any]
    slots: tuple[int, ...] = (3, 2)
    known: bool = False
    """Whether lengths are predicted, and trusted."""
    kv: int | None = None
    clusters: Mapping[str, str] = field(default_factory=dict)
    pools: Mapping[str, str] = field(default_factory=dict)
    kills: bool = False
    """Generators, the trainer and the scheduler die and come back."""
    stalls: bool = False
    """Weights fail and stall."""
    errors: bool = False
    """Some samples get no reward."""
    turn_s: float = 0.1
    step_turns: int = 1
    """The trainer takes a step in every turn of so many."""
    finish: float = 0.3
    """Chance that a sample ends with the token that it gains."""

    def run(self, seed: int) -> Recorded:
        """To its end."""
        run = Recorded(settings(**self.job), slots=self.slots, lengths=KnownLengths() if self.known else None)
        run.kv, run.clusters, run.pools = self.kv, dict(self.clusters), dict(self.pools)
        chance = Random(seed)
        run.start_trainer()
        for name in "abc":
            run.join_generator(name)
        for turn in range(1, 400):
            if run.finished:
                break
            run.trains = turn % self.step_turns == 0
            self._happen(run, turn, chance)
            run.progress_some(chance, pace=0.7, finish=self.finish)
            run.now_s += self.turn_s
            _beat(run, turn)
            run.do(run.core.tick(run.now_s))
            if turn % 7 == 0 and run.can_checkpoint():
                run.write_checkpoint()
        run.trains = True
        run.run_out()
        return run

    def _happen(self, run: Recorded, turn: int, chance: Random) -> None:
        names = [name for name, one in sorted(run.generators.items()) if one.connected and not one.leaving]
        for generator in (run.generators[name] for name in names if self.stalls):
            if generator.wanted is not None and chance.random() < 0.2:
                happens = run.fail_weights if chance.random() < 0.5 else run.stall_weights
                happens(generator)
        if self.errors and run.scores and turn % 5 == 0:
            run.score(fail=True)
        if self.kills and turn % 6 == 0:
            _kill(run, turn // 6 % 6, chance, names=names)


def _kill(run: Recorded, what: int, chance: Random, *, names: Sequence[str]) -> None:
    """One thing that goes wrong; `names`: generators that stay."""
    match what:
        case 0 if len(names) > 1:
            run.kill_generator(chance.choice(names))
        case 1:
            _rejoin(run, [one for one in "abc" if one not in run.generators or not run.generators[one].connected])
        case 2:
            run.start_trainer(credit=chance.choice([300, 1_000_000]))
        case 3 if len(names) > 1:
            run.leave_generator(chance.choice(names))
        case 4:
            run.boot()
            run.join_trainer()
            _rejoin(run, sorted(run.generators))
        case 5:
            run.trainer.connected = False
            run.do(run.core.trainer_left())
            run.join_trainer()


def _rejoin(run: Recorded, names: Sequence[str]) -> None:
    for name in names:
        run.join_generator(name)


def _beat(run: Recorded, turn: int) -> None:
    """Heartbeats, with what is measured of each generator: the later its name, the faster."""
    for place, (name, one) in enumerate(sorted(run.generators.items())):
        batch, steps = max(1, len(one.active)), MIN_STEPS * turn
        reading = {bucket_of(batch): StepCounts(steps, batch * steps, steps * 0.01 * batch / (1 + place))}
        if one.connected:
            run.do(run.core.generator_alive(name, now_s=run.now_s, reading=reading))


_OFTEN = Rebalance.model_validate({"maxMoves": 5})
_LONG = pb.Sampling(temperature=1.0, top_p=1.0, max_tokens=64)
_LENT = MappingProxyType({"b": "lent", "c": "lent"})
_TASKS = tuple(
    TaskSettings(name=name, sampling=pb.Sampling(temperature=1.0, top_p=1.0, max_tokens=tokens), max_turns=turns)
    for name, tokens, turns in (("sums", 4, None), ("games", 8, 3))
)
STORIES: Mapping[str, Story] = MappingProxyType(
    {
        "plain": Story(job={"steps": 6, "length_signals": ("History", "Ranker")}),
        "kills": Story(job={"steps": 8, "staleness": 2}, kills=True, stalls=True, errors=True, kv=24),
        "batch": Story(
            job={"steps": 5, "staleness": 0, "whole_batches": True, "draws_per_step": 2, "partial_rollouts": False},
            errors=True,
        ),
        "colocated": Story(
            job={
                "steps": 5,
                "staleness": 0,
                "whole_batches": True,
                "colocated": True,
                "shared_pools": frozenset({"p"}),
            },
            kills=True,
        ),
        "lending": Story(
            job={"steps": 6, "shared_pools": frozenset({"lent"}), "batch_groups": 8, "sampling": _LONG},
            slots=(5, 12, 12),
            pools=_LENT,
            turn_s=1.0,
            step_turns=6,
            finish=0.1,
        ),
        "moves": Story(
            job={
                "steps": 8,
                "staleness": 0,
                "batch_groups": 12,
                "rebalance": _OFTEN,
                "evaluation_prompts": 0,
                "sampling": _LONG,
            },
            slots=(12, 12, 12),
            turn_s=0.5,
            finish=0.05,
        ),
        "agents": Story(
            job={"steps": 6, "max_turns": 3, "staleness": 2, "evaluation_sampled": 1, "archived_percent": 50},
            kills=True,
            kv=24,
        ),
        "resampled": Story(
            job={
                "steps": 6,
                "max_turns": 3,
                "resampled_percent": 50,
                "staleness": 0,
                "by_number": True,
                "partial_rollouts": False,
            }
        ),
        "supervised": Story(
            job={"steps": 5, "supervised": True, "group_size": 1, "staleness": 0, "archived_percent": 100}, kills=True
        ),
        "mixture": Story(
            job={"steps": 6, "tasks": _TASKS, "shares": Mixture([1, 2]), "evaluation_prompts": 3, "draws_per_step": 3}
        ),
        "frozen": Story(
            job={"steps": 6, "reference_pool": "f", "max_turns": 2}, pools={"b": "f", "c": "f"}, kills=True, errors=True
        ),
        "clusters": Story(
            job={
                "steps": 8,
                "shares_uplink": True,
                "batch_groups": 12,
                "dispatch": "skewAware",
                "dispatch_options": SkewAware(),
            },
            slots=(5, 2, 3),
            known=True,
            clusters={"a": "east", "c": "west"},
            kills=True,
            stalls=True,
        ),
    }
)


def summary(said: list[str]) -> dict[str, Any]:
    """The effects of one world: how many of each kind, and a hash of every portion with all before it."""
    hashes, digest = [], hashlib.sha256()
    for place, line in enumerate(said, start=1):
        digest.update(line.encode() + b"\n")
        if place % PORTION == 0 or place == len(said):
            hashes.append(digest.hexdigest()[:12])
    kinds = Counter(json.loads(line)["is"] for line in said)
    return {"effects": dict(sorted(kinds.items())), "hashes": hashes}


def tell() -> dict[str, Recorded]:
    """Every world, at its end."""
    return {name: story.run(seed=11) for name, story in STORIES.items()}


def differences(runs: Mapping[str, Recorded]) -> Iterator[str]:
    """Worlds in which the core says something else than the file has, with the first effects in question."""
    known = json.loads(PLACE.read_text())
    for name, run in runs.items():
        now, then = summary(run.said), known.get(name, {"effects": {}, "hashes": []})
        if now != then:
            same = sum(1 for _ in _common(now["hashes"], then["hashes"]))
            yield f"{name}: effects {same * PORTION + 1} and following differ; {then['effects']} before, {now['effects']} now"


def _common(left: list[str], right: list[str]) -> Iterator[str]:
    for one, other in zip(left, right, strict=False):
        if one != other:
            return
        yield one


def _dump(folder: str) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, run in tell().items():
        Path(folder, f"{name}.txt").write_text("\n".join(run.said) + "\n")


def _write() -> None:
    found = {name: summary(run.said) for name, run in tell().items()}
    PLACE.write_text(json.dumps(found, indent=1) + "\n")


def _check() -> None:
    sys.exit("\n".join(differences(tell())) or 0)


if __name__ == "__main__":
    commands: Mapping[str, Callable[..., None]] = {"check": _check, "write": _write, "dump": _dump}
    commands[sys.argv[1]](*sys.argv[2:])
