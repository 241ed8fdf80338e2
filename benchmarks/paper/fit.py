"""A FIT, not a prediction: one documented setting for each model, chosen while looking at Fig. 8 and 9.

What differs from the rule: slots at 20K (at shorter lengths as many more as their samples are shorter), GPUs of both stages, scale and cost of a trained
token, a fixed part of each step (optimiser, and what else does not grow with tokens), the overhead of colocation, and how much
shorter the 10K and 5K variants are: eight free numbers for eleven of the paper. Fig. 9's oracle is late binding that knows the true
lengths, its StreamRL is Algorithm 2; `oracles` has the oracle under Algorithm 2 as well.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from paper import measured
from paper.calibration import Calibrated
from paper.facts import BATCH, GENERATION, LENGTHS, THROUGHPUT
from paper.holdout import ORACLE_PERCENT, Cell
from paper.profile import Case, makespan_s, random_s
from paper.rule import QWEN, Lengths
from paper.runs import MODES, Setting, document


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """One model's setting."""

    model: str
    scale: float
    train_gpu_s: float
    """GPU-seconds of one trained token."""
    step_s: float
    """Fixed part of a step."""
    overhead_s: float
    """Of colocation, besides."""
    slots: int
    """At 20K."""
    gpus: tuple[int, int]
    """Generation, training."""
    factors: tuple[float, float, float]
    """Lengths of the variants by `LENGTHS`, as shares of 20K's."""

    def lengths(self, place: int) -> Lengths:
        """Of a variant."""
        return Lengths.of(LENGTHS[place], factor=self.factors[place])

    def setting(self, place: int) -> Setting:
        """Of a variant."""
        found = Calibrated(scale=self.scale, train_gpu_s=self.train_gpu_s, overhead_s=self.overhead_s)
        slots = min(512, round(self.slots / self.factors[place]))
        return Setting(model=self.model, lengths=self.lengths(place), found=found, slots=slots)


FITS = (
    Fit(
        model="7B",
        scale=0.885,
        train_gpu_s=8.2e-5,
        step_s=16.0,
        overhead_s=14.0,
        slots=16,
        gpus=(24, 8),
        factors=(0.285, 0.56, 1.0),
    ),
    Fit(
        model="32B",
        scale=1.861,
        train_gpu_s=1.3e-3,
        step_s=30.0,
        overhead_s=5.0,
        slots=26,
        gpus=(40, 24),
        factors=(0.315, 0.65, 1.0),
    ),
    Fit(
        model="72B",
        scale=2.07,
        train_gpu_s=2.3e-3,
        step_s=45.0,
        overhead_s=62.0,
        slots=26,
        gpus=(80, 48),
        factors=(0.31, 0.66, 1.0),
    ),
)


def cells() -> Iterator[Cell]:
    """Fig. 8 and 9 under the fits."""
    for fit in FITS:
        for place, length in enumerate(LENGTHS):
            for system, rate in _rates(fit, place).items():
                yield Cell(
                    table=system, name=f"{fit.model} {length}", paper=THROUGHPUT[system][fit.model][place], ours=rate
                )
        case = fit.setting(len(LENGTHS) - 1).case(fit.gpus[0])
        base_s = random_s(case)
        found = {
            "StreamRL": makespan_s(case),
            "oracle": makespan_s(case, dispatch="longestFirst", recall=ORACLE_PERCENT),
        }
        for name, seconds in found.items():
            yield Cell(
                table="Fig. 9", name=f"{fit.model} {name}", paper=GENERATION[fit.model][name], ours=seconds / base_s
            )


def oracles() -> Iterator[tuple[str, float]]:
    """Model, and Fig. 9's oracle under Algorithm 2 as a share of random dealing: what the fit does not use."""
    for fit in FITS:
        case = fit.setting(len(LENGTHS) - 1).case(fit.gpus[0])
        yield fit.model, makespan_s(case, recall=ORACLE_PERCENT) / random_s(case)


def _rates(fit: Fit, place: int) -> dict[str, float]:
    one, gpus = fit.setting(place), QWEN[fit.model].gpus
    whole = Case(model=fit.model, lengths=one.lengths, gpus=gpus, slots=one.slots)
    training_s = one.found.training_s(one.lengths, gpus=gpus)
    colocated_s = fit.scale * random_s(whole) + training_s + fit.step_s + fit.overhead_s
    rates = {"ColocationRL": BATCH / colocated_s}
    for system, mode in MODES.items():
        plain = document(one, one.case(fit.gpus[0]), trainer_gpus=fit.gpus[1], mode=mode)
        plain["trainer"]["secondsPerStep"] = fit.step_s
        rates[system] = BATCH / measured.run(plain).step_s()
    return rates
