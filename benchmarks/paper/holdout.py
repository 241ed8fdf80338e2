"""What the calibration never saw: StreamRL-Sync and -Async, Fig. 9, the two datacenters, the ablation. Real decisions, modelled times."""

from collections.abc import Iterator
from dataclasses import dataclass

from paper import measured
from paper.calibration import calibrate, colocated_s
from paper.facts import (
    ABLATION,
    BATCH,
    CROSS,
    GENERATION,
    LENGTHS,
    MACHINE_COST,
    MACHINE_GPUS,
    MODELS,
    THROUGHPUT,
)
from paper.profile import Case, makespan_s, random_s
from paper.rule import H20, REMOTE_BYTES_PER_S, RULE, Knobs, Lengths
from paper.runs import Setting, colocated, document, ours, split, throughput

CROSS_GPUS = (32, 16)
"""H20 that generate, H800 that train."""
SINGLE_GPUS = 32
ORACLE_PERCENT = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One number of the paper and ours."""

    table: str
    name: str
    paper: float
    ours: float

    @property
    def error(self) -> float:
        """Relative."""
        return self.ours / self.paper - 1


def setting(model: str, length: str, knobs: Knobs) -> Setting:
    """As calibrated."""
    lengths = Lengths.of(length, mode_tokens=knobs.mode_tokens)
    return Setting(model=model, lengths=lengths, found=calibrate(model, knobs), knobs=knobs)


def sizes(model: str, length: str) -> tuple[int, int]:
    """GPUs of generation and training: Algorithm 1's under the rule, also where the knobs are others."""
    found = split(setting(model, length, RULE))
    return found.generator_devices, found.trainer_devices


def calibration_cells(knobs: Knobs = RULE) -> Iterator[Cell]:
    """What was fitted: its residuals."""
    for model in MODELS:
        for length, paper in zip(LENGTHS, THROUGHPUT["ColocationRL"][model], strict=True):
            yield Cell(
                table="ColocationRL",
                name=f"{model} {length}",
                paper=paper,
                ours=BATCH / colocated_s(model, length, knobs),
            )


def throughput_cells(knobs: Knobs = RULE) -> Iterator[Cell]:
    """Fig. 8."""
    for model in MODELS:
        for place, length in enumerate(LENGTHS):
            for system in ("StreamRL-Sync", "StreamRL-Async"):
                found = throughput(setting(model, length, knobs), system, sizes=sizes(model, length))
                yield Cell(table=system, name=f"{model} {length}", paper=THROUGHPUT[system][model][place], ours=found)


def generation_cells(knobs: Knobs = RULE) -> Iterator[Cell]:
    """Fig. 9, on the GPUs that Algorithm 1 gives to generation."""
    for model, shares in GENERATION.items():
        one = setting(model, "20K", knobs)
        case = one.case(sizes(model, "20K")[0])
        base_s = random_s(case)
        for name, recall in (("StreamRL", None), ("oracle", ORACLE_PERCENT)):
            seconds = makespan_s(case) if recall is None else makespan_s(case, recall=recall)
            yield Cell(table="Fig. 9", name=f"{model} {name}", paper=shares[name], ours=seconds / base_s)


def machines_cost(h20: int, h800: int) -> float:
    """Of so many GPUs, in the paper's unit."""
    return (h20 * MACHINE_COST["H20"] + h800 * MACHINE_COST["H800"]) / MACHINE_GPUS


def cross_case(one: Setting, *, gpus: int) -> Case:
    """Generation on so many H20."""
    return Case(model=one.model, lengths=one.lengths, gpus=gpus, knobs=one.knobs, hardware=H20)


def cross_speed(one: Setting, *, sizes: tuple[int, int]) -> float:
    """Samples/s with so many H20 that generate and H800 that train, over the link between the two datacenters."""
    case = cross_case(one, gpus=sizes[0])
    plain = document(one, case, trainer_gpus=sizes[1], mode="StreamAsync", bandwidth=REMOTE_BYTES_PER_S)
    return BATCH / measured.run(plain).step_s()


def cross_cells(knobs: Knobs = RULE) -> Iterator[Cell]:
    """Two datacenters and one, samples/s by cost; the unit of cost is that of the two."""
    single_cost = machines_cost(0, SINGLE_GPUS) / machines_cost(*CROSS_GPUS)
    for place, length in enumerate(LENGTHS):
        one = setting("7B", length, knobs)
        speed = cross_speed(one, sizes=CROSS_GPUS)
        single = throughput(one, "StreamRL-Async", sizes=sizes("7B", length)) / single_cost
        yield Cell(table="Table 3", name=f"H20 + H800 {length}", paper=CROSS["H20 + H800"][place], ours=speed)
        yield Cell(table="Table 3", name=f"H800 {length}", paper=CROSS["H800"][place], ours=single)
        ratio = CROSS["H20 + H800"][place] / CROSS["H800"][place]
        yield Cell(table="Table 3", name=f"gain {length}", paper=ratio, ours=speed / single)


def ablation_cells(knobs: Knobs = RULE) -> Iterator[Cell]:
    """72B at 20K, by ColocationRL."""
    one = setting("72B", "20K", knobs)
    base, chosen = BATCH / colocated_s("72B", "20K", knobs), sizes("72B", "20K")
    found = {
        "+ skewness-aware": colocated(one, dispatch="skewAware"),
        "+ disaggregated streaming": throughput(one, "StreamRL-Sync", sizes=chosen),
        "+ asynchronous": throughput(one, "StreamRL-Async", sizes=chosen),
    }
    for name, rate in found.items():
        yield Cell(table="ablation", name=name, paper=ABLATION[name], ours=rate / base)


def our_cells(knobs: Knobs = RULE) -> Iterator[Cell]:
    """The defaults of this project beside StreamRL-Async: late binding, and batches that overlap. Not a comparison of errors."""
    for model in MODELS:
        for place, length in enumerate(LENGTHS):
            paper = THROUGHPUT["StreamRL-Async"][model][place]
            yield Cell(
                table="ours",
                name=f"{model} {length}",
                paper=paper,
                ours=ours(setting(model, length, knobs), sizes=sizes(model, length)),
            )


def held_out(knobs: Knobs = RULE) -> Iterator[Cell]:
    """All of them."""
    yield from throughput_cells(knobs)
    yield from generation_cells(knobs)
    yield from cross_cells(knobs)
    yield from ablation_cells(knobs)
