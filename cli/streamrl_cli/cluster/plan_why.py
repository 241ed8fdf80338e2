"""Why `streamrl plan --optimize` chose these sizes: the choice beside its neighbours, and what bounds it. Text only."""

from collections.abc import Sequence
from dataclasses import dataclass

from streamrl_cli.cluster.table import columns
from streamrl_operator.allocation.values import Allocation

_COSTED_SAMPLES = 1000
_NEAR_FLOOR = 1.1
"""Generation within this of the longest answer's own time is not made faster by more generators."""
_HEAD = (
    "GENERATORS",
    "PROCESSES",
    "GENERATION",
    "TRAINING",
    "STEP",
    "COST AN HOUR",
    f"COST OF {_COSTED_SAMPLES} SAMPLES",
    "",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was chosen, among what."""

    pool: str
    chosen: Allocation
    beside: Sequence[Allocation]
    replica_devices: int
    given: tuple[int | None, int | None, int | None]
    """Devices of one kind for both; for generation, for training where there are two kinds."""
    samples: int
    """Of a step."""
    floor_s: float
    """The least that generation takes."""
    tolerance: float
    notes: Sequence[str]


def why(choice: Choice) -> list[str]:
    """The lines."""
    chosen = choice.chosen
    replicas = chosen.generator_devices // choice.replica_devices
    rows = sorted([chosen, *choice.beside], key=lambda one: (one.generator_devices, one.trainer_devices))
    table = columns(_HEAD, [_row(one, choice) for one in rows])
    return [
        f"WHY {_count(replicas, 'generator')} in pool {choice.pool} and {_count(chosen.trainer_devices, 'trainer process')}",
        *(f"  {line}" for line in table),
        f"  {_bound(choice)}",
        f"  the cheapest step among those at most {choice.tolerance:.0%} longer than the best; {_devices(choice)}",
        *(f"  {note}" for note in choice.notes),
    ]


def _row(one: Allocation, choice: Choice) -> tuple[str, ...]:
    cost = one.cost_of(_COSTED_SAMPLES, samples_per_step=choice.samples)
    remark = "<- chosen" if one == choice.chosen else "" if _fits(one, choice) else "more devices than there are"
    return (
        str(one.generator_devices // choice.replica_devices),
        str(one.trainer_devices),
        f"{one.generation_s:.4g} s",
        f"{one.training_s:.4g} s",
        f"{one.step_s:.4g} s",
        f"{one.cost_per_hour:.2f}",
        f"{cost:.4g}",
        remark,
    )


def _fits(one: Allocation, choice: Choice) -> bool:
    both, generating, training = choice.given
    if both is not None:
        return one.generator_devices + one.trainer_devices <= both
    assert generating is not None
    assert training is not None
    return one.generator_devices <= generating and one.trainer_devices <= training


def _bound(choice: Choice) -> str:
    chosen = choice.chosen
    times = f"generation {chosen.generation_s:.4g} s, training {chosen.training_s:.4g} s"
    if chosen.bound == "training":
        return f"training sets the time of a step: {times}"
    if chosen.generation_s <= _NEAR_FLOOR * choice.floor_s:
        longest = f"the longest answer alone takes {choice.floor_s:.4g} s, so more generators would not help"
        return f"generation sets the time of a step: {times}; {longest}"
    if chosen.bound == "generation":
        return f"generation sets the time of a step: {times}"
    return f"the stages are balanced: {times}"


def _devices(choice: Choice) -> str:
    used = (choice.chosen.generator_devices, choice.chosen.trainer_devices)
    both, generating, training = choice.given
    if both is not None:
        return f"{sum(used)} of {both} devices"
    return f"{used[0]} of {generating} devices generate, {used[1]} of {training} train"


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"
