"""What the scheduler's core is told of a scenario: the settings that it would read out of the RLJob of the same run.

The scheduler reads them itself (`Settings.from_job`), so that a field of `scheduling` means here what it means there.
Held-out evaluation is left out: it is the same load in every setting that is compared.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from streamrl.latency import LatencyCurve
from streamrl.proto import stream_pb2 as pb
from streamrl.spec.base import SpecModel, parse_bytes
from streamrl.spec.rljob import RLJobSpec
from streamrl_cli.simulation.lengths import LengthModel
from streamrl_cli.simulation.ranker import ModelledRanker
from streamrl_cli.simulation.scenario import Scenario
from streamrl_workers.scheduler.dispatch.measured import Curves
from streamrl_workers.scheduler.lengths import LengthHistory, Lengths
from streamrl_workers.scheduler.settings import Settings


def core_settings(scenario: Scenario) -> Settings:
    """The core's settings; bytes and tokens are in the scenario's units of `resolutionTokens`."""
    unit = scenario.resolution_tokens
    settings = Settings.from_job(RLJobSpec.model_validate_json(json.dumps(_job(scenario))))
    return replace(
        settings,
        sampling=pb.Sampling(temperature=1.0, top_p=1.0, max_tokens=-(-scenario.max_tokens // unit)),
        evaluation_prompts=0,
        max_buffer_bytes=max(1, parse_bytes(scenario.scheduling.max_buffer_bytes) // unit),
    )


def predictions(scenario: Scenario, *, lengths: LengthModel, step: Callable[[], int]) -> Lengths:
    """What predicts lengths: the signals of `scheduling`, and behind them the modelled ranker if there is one.

    Args:
        scenario: what is simulated.
        lengths: the true lengths, of which the ranker knows as much as it is said to.
        step: steps that are recorded now.
    """
    signals: tuple[str, ...] = scenario.scheduling.length_signals
    ranker = None
    if scenario.ranker is not None:
        signals = (*signals, "Ranker")
        ranker = ModelledRanker(scenario.ranker, lengths=lengths, seed=scenario.seed, step=step)
    return Lengths(LengthHistory(), signals=signals, ranker=ranker)


def known_curves(scenario: Scenario) -> Curves | None:
    """The pools' curves, if the scheduler is to know them; per unit of `resolutionTokens`, as it is told lengths."""
    if not scenario.curves_known:
        return None
    unit = scenario.resolution_tokens
    return Curves(
        {
            pool.name: LatencyCurve.of_milliseconds(((p.batch, p.milliseconds) for p in pool.latency), scale=unit)
            for pool in scenario.pools
        }
    )


def _job(scenario: Scenario) -> dict[str, Any]:
    """The smallest job with the scenario's scheduling; what the core does not look at is of no account."""
    return {
        "seed": scenario.seed,
        "model": {"scratch": {}},
        "task": {
            "dataset": {"jsonl": {"path": "none.jsonl"}},
            "groupSize": scenario.group_size,
            "sampling": {"maxTokens": 1},
            "rewards": [{"name": "answer", "exactMatch": {}}],
        },
        "pipeline": _plain(scenario.pipeline),
        "scheduling": _plain(scenario.scheduling),
        "generators": [{"name": "sim", "engine": {"simulated": {}}}],
        "trainer": {"engine": {"simulated": {}}},
    }


def _plain(model: SpecModel) -> dict[str, Any]:
    return model.model_dump(mode="json", by_alias=True, exclude_none=True)
