"""Whole runs of a calibrated model: GPUs by Algorithm 1, then StreamRL-Sync and -Async through the simulator.

    Sync    StreamSync
    Async   StreamAsync, S = 1
    both    the paper's trainer asks for one batch after the other (`batchByBatch`); dispatch by Algorithm 2; recall .87

`ours` is StreamAsync as it is meant to be used: late binding, and the next batch's samples take the slots that free. Does not own the rule.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

from paper import measured
from paper.calibration import Calibrated
from paper.facts import BATCH, MACHINE_GPUS
from paper.profile import Case, makespan_s, scenario
from paper.rule import LINK_BYTES_PER_S, PROMPT_TOKENS, QWEN, RULE, Knobs, Lengths
from streamrl_operator.allocation.choice import Allocation, Sizes, Stage, one_datacenter
from streamrl_operator.allocation.stage_times import StageCurve

PROFILED_SHARES = (0.375, 0.5, 0.625, 0.75)
"""Of all GPUs, in whole machines: where generation is profiled."""
PIPELINE_STEPS = 4
MODES = {"StreamRL-Sync": "StreamSync", "StreamRL-Async": "StreamAsync"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A calibrated model at one length."""

    model: str
    lengths: Lengths
    found: Calibrated
    knobs: Knobs = RULE
    slots: int | None = None
    """Instead of the rule's."""

    def case(self, gpus: int) -> Case:
        """Generation on so many GPUs."""
        return Case(model=self.model, lengths=self.lengths, gpus=gpus, knobs=self.knobs, slots=self.slots)


@cache
def split(setting: Setting) -> Allocation:
    """Algorithm 1, in machines, over profiled points of generation; training splits evenly."""
    gpus = QWEN[setting.model].gpus
    points = {round(share * gpus / MACHINE_GPUS) * MACHINE_GPUS for share in PROFILED_SHARES}
    generation = StageCurve.through({x: setting.found.scale * makespan_s(setting.case(x)) for x in sorted(points)})
    sizes = Sizes(unit=MACHINE_GPUS, least=MACHINE_GPUS)
    training = StageCurve.through({1: max(1e-6, setting.found.training_s(setting.lengths, gpus=1))})
    return one_datacenter(
        Stage(seconds=generation.at, sizes=sizes), Stage(seconds=training.at, sizes=sizes), devices=gpus, tolerance=0.0
    )


def document(
    setting: Setting,
    case: Case,
    *,
    trainer_gpus: int,
    mode: str,
    dispatch: str = "skewAware",
    bandwidth: float = LINK_BYTES_PER_S,
) -> dict[str, Any]:
    """The scenario of a run."""
    found, model = setting.found, QWEN[setting.model]
    plain = scenario(case, mode=mode, dispatch=dispatch, steps=PIPELINE_STEPS, scale=found.scale)
    token_s = found.train_gpu_s / trainer_gpus
    plain["pools"][0]["bandwidth"] = f"{round(bandwidth)}"
    plain["trainer"] |= {
        "secondsPerToken": token_s,
        "secondsPerSample": token_s * PROMPT_TOKENS,
        "weightBytes": round(model.weight_bytes),
        "secondsPerStep": found.overhead_s if mode == "Colocated" else 0.0,
    }
    return plain


def throughput(setting: Setting, system: str, *, sizes: tuple[int, int]) -> float:
    """Samples/s of a system; `sizes`: GPUs of generation and training."""
    x, y = sizes
    plain = document(setting, setting.case(x), trainer_gpus=y, mode=MODES[system])
    return BATCH / measured.run(plain).step_s()


def ours(setting: Setting, *, sizes: tuple[int, int]) -> float:
    """Samples/s of the defaults: late binding, and slots that free take the next batch's samples."""
    x, y = sizes
    plain = document(setting, setting.case(x), trainer_gpus=y, mode="StreamAsync", dispatch="longestFirst")
    return BATCH / measured.run(plain | {"batchByBatch": False}).step_s()


def colocated(setting: Setting, *, dispatch: str) -> float:
    """Samples/s where the stages take turns on all GPUs, dispatched by the scheduler."""
    gpus = QWEN[setting.model].gpus
    plain = document(setting, setting.case(gpus), trainer_gpus=gpus, mode="Colocated", dispatch=dispatch)
    return BATCH / measured.run(plain).step_s()
