"""Random scenarios: fleets, lengths, predictors. A scenario is its number, and its draws are theirs.

    fleets       1-4 pools of 1-32 replicas in all, 4-256 slots, curves from flat to linear, one up to four times as slow as another
    lengths      log-normal, sigma 0.2-1.4, or a Pareto tail of power 1.1-3, cut at 4-40 medians; up to the half of the spread within groups
    load         about 0.25-4 samples a slot, 32-128 samples a step, groups of 2-8; three steps of S = 0, or five of S = 1
    knowledge    three fleets in ten have known speeds, else they are measured on the way; weights are loaded by one replica after the other
    predictors   an oracle, good, middling, chance, bad, inverted; history; one that flips when the run begins or is under way

Owns what is drawn. Does not own the run (`world.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from dispatch.draws import Group, Population, draw, heavy, log_normal, ranked, remembered, scores
from dispatch.world import Job, Pool
from streamrl.latency import LatencyCurve
from streamrl_workers.scheduler.lengths import Lengths

MEDIAN_TOKENS = 1000.0
UNIT = 20
TURNS, STEPS = 3, 5
"""With S = 0, and with S = 1."""
KNOWN_CURVES = 0.3
"""Share of scenarios in which the speeds of pools are known from the start; else they are measured, as in every real run."""
LOADING = (0.01, 0.1)
"""Least and most time of the first replica's loading, as a share of a sample's; the last takes up to three times as long."""
FLIP_BATCHES = 24
"""Steps of a run in which the predictor flips: behind it the guard needs up to 96 groups to notice, and all count."""
LEAST_SLOTS = 4
LEAST_SAMPLES, MOST_SAMPLES = 32, 128

KINDS = ("oracle", "good", "middling", "chance", "bad", "inverted", "history", "flip")
WEIGHTS = (14, 24, 14, 10, 6, 8, 18, 6)
CORRELATIONS = {"good": (0.85, 0.98), "middling": (0.3, 0.85), "chance": (-0.1, 0.1), "bad": (-0.9, -0.1)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One of them."""

    number: int
    job: Job
    """With `fifo`."""
    population: Population
    kind: str
    """Of predictor."""
    correlation: float
    text: str
    """For people."""

    @property
    def groups(self) -> int:
        """Of the whole run; with S = 1 one more batch may be planned."""
        return (self.job.steps + self.job.staleness) * self.job.batch_groups


def scenario(number: int, *, seed: int) -> Scenario:
    """The scenario of this number."""
    chance = Random(f"scenario {seed} {number}")
    kind = chance.choices(KINDS, WEIGHTS)[0]
    group_size = chance.choice((2, 4, 4, 8))
    samples = round(LEAST_SAMPLES * (MOST_SAMPLES / LEAST_SAMPLES) ** chance.random())
    pools = _fitted(_pools(chance), slots=samples / 4 ** chance.uniform(-1, 1))
    slots = sum(pool.slots * pool.replicas for pool in pools)
    batch = max(4, round(samples / group_size))
    population, shape = _population(chance, group_size=group_size)
    low, high = CORRELATIONS.get(kind, (1.0, 1.0))
    correlation = -1.0 if kind == "inverted" else chance.uniform(low, high)
    staleness = 1 if kind == "flip" else chance.randint(0, 1)
    mean_s = MEDIAN_TOKENS * 1.5 * pools[0].curve.at(pools[0].slots)
    job = Job(
        pools=pools,
        batch_groups=batch,
        group_size=group_size,
        dispatch="fifo",
        steps=FLIP_BATCHES if kind == "flip" else STEPS if staleness else TURNS,
        staleness=staleness,
        unit=UNIT,
        curves_known=chance.random() < KNOWN_CURVES,
        beat_s=mean_s / 8,
    )
    job = replace(job, beat_s=0.0) if job.curves_known else job
    first_s = mean_s * chance.uniform(*LOADING)
    job = replace(job, load_s=(first_s, first_s * chance.uniform(1, 3)))
    fleet = ", ".join(f"{p.replicas}x{p.slots} {_times(p.curve, slots=p.slots)}" for p in pools)
    text = (
        f"{kind} {correlation:+.2f}; {fleet}{'' if job.curves_known else ' (curves measured)'}; {batch}x{group_size} samples = "
        f"{batch * group_size / slots:.2f} a slot; {shape}; S={job.staleness}"
    )
    return Scenario(number=number, job=job, population=population, kind=kind, correlation=correlation, text=text)


def drawn(found: Scenario, number: int, *, seed: int) -> tuple[list[Group], list[Group], list[list[float]]]:
    """Groups of one draw, groups before them, and what is said of both."""
    chance = Random(f"draw {seed} {found.number} {number}")
    groups = draw(found.population, groups=found.groups, chance=chance)
    past = draw(found.population, groups=320, chance=chance)
    said = [scores(part, correlation=found.correlation, chance=chance) for part in (groups, past)]
    if found.kind == "flip":
        said[0] = [-score for score in said[0]]
    return groups, past, said


def predictions(
    found: Scenario, groups: Sequence[Group], past: Sequence[Group], said: Sequence[Sequence[float]], *, number: int
) -> Lengths:
    """Predictions for the runs of a draw; each run takes a copy. No prompt comes twice in a run."""
    if found.kind == "history":
        epochs = -(-320 // len(groups))
        chance = Random(f"past {found.number} {number}")
        return remembered(found.population, groups, epochs=epochs, unit=UNIT, chance=chance)
    return ranked(said[0], past=past, past_said=said[1], unit=UNIT)


def _pools(chance: Random) -> list[Pool]:
    count = chance.choices((1, 2, 3, 4), (45, 30, 15, 10))[0]
    pools = []
    for place in range(count):
        slots = round(4 * 64 ** chance.random())
        replicas = max(1, round(32 ** chance.random() / count))
        empty_s = 0.01 * (4 ** chance.random() if place else 1.0)
        pools.append(Pool(name=f"p{place}", replicas=replicas, slots=slots, curve=_curve(chance, slots, empty_s)))
    return pools


def _fitted(pools: Sequence[Pool], *, slots: float) -> list[Pool]:
    """About so many slots in all: fewer replicas while there are many, then fewer slots each."""
    found = list(pools)
    while (total := sum(pool.slots * pool.replicas for pool in found)) > slots:
        place = max(range(len(found)), key=lambda index: found[index].slots * found[index].replicas)
        pool = found[place]
        if pool.replicas > 2:
            found[place] = replace(pool, replicas=max(2, pool.replicas // 2))
        elif pool.slots > LEAST_SLOTS:
            found[place] = replace(pool, slots=max(LEAST_SLOTS, int(pool.slots * min(0.9, max(0.5, slots / total)))))
        else:
            break
    return found


def _curve(chance: Random, slots: int, empty_s: float) -> LatencyCurve:
    """From flat to linear; a full batch takes 1 to `slots` times an empty one's step."""
    bend = chance.random() ** 2
    knee = max(1, round(slots * chance.random() * 0.5))
    batches = sorted({1, knee, max(2, slots)})
    return LatencyCurve(tuple(batches), tuple(empty_s * (1 + bend * max(0, batch - knee)) for batch in batches))


def _population(chance: Random, *, group_size: int) -> tuple[Population, str]:
    most = MEDIAN_TOKENS * 4 * 10 ** chance.random()
    within = 0.5 * chance.random()
    if chance.random() < 0.7:
        sigma = chance.uniform(0.2, 1.4)
        shape, text = log_normal(median=MEDIAN_TOKENS, sigma=sigma), f"sigma {sigma:.2f}"
    else:
        power = chance.uniform(1.1, 3.0)
        shape, text = heavy(median=MEDIAN_TOKENS, power=power), f"power {power:.2f}"
    population = Population(shape=shape, within=within, most=round(most), group_size=group_size)
    return population, f"{text} cut at {most / MEDIAN_TOKENS:.1f} medians, {within:.0%} within"


def _times(curve: LatencyCurve, *, slots: int) -> str:
    return f"{1e3 * curve.at(1):.3g}-{1e3 * curve.at(slots):.3g} ms"
