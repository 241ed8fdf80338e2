"""The part `scaling` of the scheduler's `/numbers`: what an autoscaler decides from.

Owns names and units (seconds, samples, bytes, shares of 1). Absent is null: nothing is known. Decides nothing.

    step_s             mean seconds between recorded steps
    generation_s       T_gen: of these, a generator generates for so many (parts busy and skew), mean over generators
    generator_seconds  the same, summed over generators: n equal ones need about generator_seconds / n
    training_s         T_train: of these, the trainer is busy for so many

Both times are share of the wall times step_s, since heartbeats and steps do not come together.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from streamrl_workers.scheduler.core_view import CoreView
from streamrl_workers.scheduler.pool_view import PoolView
from streamrl_workers.scheduler.shell.rates import BeatWindow, StepClock, mean_shares, tokens_per_s
from streamrl_workers.scheduler.shell.switchboard import GeneratorEntry, TrainerEntry

_GENERATING = ("busy", "skew")


def scaling(
    view: CoreView,
    *,
    generators: Sequence[GeneratorEntry],
    trainer: TrainerEntry | None,
    clock: StepClock,
    now_s: float,
) -> dict[str, Any]:
    """The page's content."""
    step_s = clock.step_s
    return {
        "waiting_samples": view.waiting_samples,
        "free_slots": view.fleet.free_slots,
        "buffered_groups": view.buffered_groups,
        "buffered_bytes": view.buffered_bytes,
        "step": view.step,
        "steps_left": view.steps - view.step,
        "step_s": step_s,
        "steps_per_s": 1 / step_s if step_s else None,
        "since_step_s": clock.since_s(now_s=now_s),
        **_times(step_s, generators=[entry.beats for entry in generators], trainer=trainer),
        "trainer": None if trainer is None else trainer.beats.shares(),
        "all": _pool(view.fleet, windows=[entry.beats for entry in generators]),
        "pools": {
            name: _pool(pool, windows=[entry.beats for entry in generators if entry.hello.pool == name])
            for name, pool in view.pools.items()
        },
    }


def _times(
    step_s: float | None, *, generators: Sequence[BeatWindow], trainer: TrainerEntry | None
) -> dict[str, float | None]:
    generating = _share(mean_shares(generators), parts=_GENERATING)
    training = _share(None if trainer is None else trainer.beats.shares(), parts=("busy",))
    generation_s = None if step_s is None or generating is None else step_s * generating
    return {
        "generation_s": generation_s,
        "generator_seconds": None if generation_s is None else generation_s * len(generators),
        "training_s": None if step_s is None or training is None else step_s * training,
    }


def _share(shares: Mapping[str, float] | None, *, parts: Sequence[str]) -> float | None:
    return None if shares is None else sum(shares[part] for part in parts)


def _pool(pool: PoolView, *, windows: Sequence[BeatWindow]) -> dict[str, Any]:
    return {
        "generators": pool.generators,
        "leaving": pool.leaving,
        "silent": pool.silent,
        "slots": pool.slots,
        "active": pool.active,
        "tokens_per_s": tokens_per_s(windows),
        "idle": dict(pool.idle),
        "parts": mean_shares(windows),
    }
