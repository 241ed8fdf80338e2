"""Fig. 10, 11, 12 and Table 3: how many GPUs for which stage, the elastic trace, what a simulation can say of staleness, two datacenters with prices.

Fits, not predictions: Fig. 10's own points go in, and the elastic scenario was chosen for this trace. The decisions are the operator's
`allocation` and `autoscaler`, and the scheduler's staleness rule.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from paper import measured
from paper.facts import CHOSEN_SPLIT, EVEN_SPLIT, LENGTHS, MACHINE_COST, MACHINE_GPUS
from paper.holdout import CROSS_GPUS, cross_case, cross_cells, cross_speed, machines_cost, setting
from paper.profile import makespan_s
from paper.rule import QWEN, RULE
from paper.runs import MODES, Setting, document, split
from streamrl_cli.simulation.reading import read_scenario
from streamrl_cli.simulation.results import summary
from streamrl_cli.simulation.world import simulate
from streamrl_operator.allocation.choice import Allocation, Sizes, Stage, one_datacenter, two_datacenters
from streamrl_operator.allocation.stage_times import StageCurve

ELASTIC_SCENARIO = Path(__file__).resolve().parents[2] / "examples" / "simulations" / "elastic.yaml"
ELASTIC_SEEDS = range(5)
"""Other lengths are drawn: one seed's iterations are an accident."""
GPUS_OF_A_REPLICA = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRow:
    """GPUs of generation and training, by whose profile, and both times by the even split's generation."""

    model: str
    profile: str
    sizes: tuple[int, int]
    paper: tuple[int, int]
    generation: float
    training: float
    gain: float
    """Time of the even split over that of the chosen one."""


def from_the_papers_points() -> Iterator[SplitRow]:
    """Algorithm 1 on the times that Fig. 10 reports: both stages at the even split and at the chosen one."""
    for model, ((x, y), (generation, training)) in CHOSEN_SPLIT.items():
        half = QWEN[model].gpus // 2
        unit = abs(x - half)
        gen = StageCurve.through({half: 1.0, x: generation})
        train = StageCurve.through({y: training, half: EVEN_SPLIT[model]})
        sizes = Sizes(unit=unit, least=unit)
        found = one_datacenter(
            Stage(seconds=gen.at, sizes=sizes),
            Stage(seconds=train.at, sizes=sizes),
            devices=QWEN[model].gpus,
            tolerance=0.0,
        )
        yield SplitRow(
            model=model,
            profile="the paper's points",
            sizes=(found.generator_devices, found.trainer_devices),
            paper=(x, y),
            generation=found.generation_s,
            training=found.training_s,
            gain=1.0 / found.step_s,
        )


def from_the_rule() -> Iterator[SplitRow]:
    """Algorithm 1 on simulated generation at 20K, as in the hold-out; the even split's ratio was calibrated, the choice was not."""
    for model, (paper, _) in CHOSEN_SPLIT.items():
        one = setting(model, LENGTHS[-1], RULE)
        found = split(one)
        even_s = even_split_s(model)
        yield SplitRow(
            model=model,
            profile="simulated",
            sizes=(found.generator_devices, found.trainer_devices),
            paper=paper,
            generation=found.generation_s / even_s,
            training=found.training_s / even_s,
            gain=even_s / found.step_s,
        )


def even_split_s(model: str) -> float:
    """Generation on half of the GPUs."""
    one = setting(model, LENGTHS[-1], RULE)
    return one.found.scale * makespan_s(one.case(QWEN[model].gpus // 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedRow:
    """Two datacenters, 7B: samples/s by cost as `facts.CROSS` has it, of the paper's GPUs and of those that the planner takes of them."""

    length: str
    sizes: tuple[int, int]
    """H20 that generate, H800 that train, by the planner."""
    papers_sizes: float
    planned: float
    single: float
    """On 32 H800 in one datacenter."""


def priced() -> Iterator[PricedRow]:
    """Algorithm 1 for two datacenters: the same time or at most 5 % more, with what is not needed given back."""
    found = {cell.name: cell.ours for cell in cross_cells()}
    for length in LENGTHS:
        one = setting("7B", length, RULE)
        chosen = _two_datacenters(one)
        sizes = (chosen.generator_devices, chosen.trainer_devices)
        by_cost = machines_cost(*CROSS_GPUS) / machines_cost(*sizes)
        yield PricedRow(
            length=length,
            sizes=sizes,
            papers_sizes=found[f"H20 + H800 {length}"],
            planned=cross_speed(one, sizes=sizes) * by_cost,
            single=found[f"H800 {length}"],
        )


def _two_datacenters(one: Setting) -> Allocation:
    generators, trainers = CROSS_GPUS
    profiled = range(MACHINE_GPUS, generators + 1, MACHINE_GPUS)
    generation = StageCurve.through({x: one.found.scale * makespan_s(cross_case(one, gpus=x)) for x in profiled})
    training = StageCurve.through({1: one.found.training_s(one.lengths, gpus=1)})
    sizes = Sizes(unit=MACHINE_GPUS, least=MACHINE_GPUS)
    stages = (
        Stage(seconds=curve.at, sizes=sizes, device_cost_per_hour=MACHINE_COST[name] / MACHINE_GPUS)
        for name, curve in (("H20", generation), ("H800", training))
    )
    return two_datacenters(*stages, generator_devices=generators, trainer_devices=trainers)


def elastic_traces() -> dict[int, list[int]]:
    """GPUs -> steps done when they were first decided, by seed, for the sizes that all seeds came to."""
    traces = [dict(reversed(_elastic_trace(seed=seed))) for seed in ELASTIC_SEEDS]
    return {gpus: [trace[gpus] for trace in traces] for gpus in traces[0] if all(gpus in trace for trace in traces)}


def _elastic_trace(*, seed: int) -> list[tuple[int, int]]:
    """(GPUs, steps done when they were decided) of examples/simulations/elastic.yaml, by the operator's own scaling."""
    scenario = read_scenario(ELASTIC_SCENARIO).model_copy(update={"seed": seed})
    found = summary(simulate(scenario))
    return [
        (GPUS_OF_A_REPLICA * size["replicas"], sum(row["at_s"] <= size["at_s"] for row in found["by_step"]))
        for size in found["sizes"]
    ]


def ages() -> Mapping[str, Mapping[str, int]]:
    """Fig. 12's two settings, 32B at 20K: age in steps -> groups."""
    one = setting("32B", LENGTHS[-1], RULE)
    found = split(one)
    ages = {}
    for system, mode in MODES.items():
        plain = document(one, one.case(found.generator_devices), trainer_gpus=found.trainer_devices, mode=mode)
        ages[system] = measured.simulated(plain)["staleness"]
    return ages
