"""The names that plug-ins import from `streamrl.plugins`, each loaded when it is asked for: a dispatch policy needs no torch."""

from importlib import import_module

_ALGORITHMS = "streamrl_workers.trainer.algorithms"
_DISPATCH = "streamrl_workers.scheduler.dispatch"
_TRACKERS = "streamrl_workers.trackers.registry"
_CONTRACT = "streamrl.spec.algorithm"
NAMES: dict[str, str] = {
    "AlgorithmSetup": f"{_ALGORITHMS}.algorithm",
    "BatchAlgorithm": f"{_ALGORITHMS}.algorithm",
    "GroupAlgorithm": f"{_ALGORITHMS}.algorithm",
    "ModelTurn": f"{_ALGORITHMS}.algorithm",
    "RewardedSample": f"{_ALGORITHMS}.algorithm",
    "TokenBatch": f"{_ALGORITHMS}.algorithm",
    "TokenLoss": f"{_ALGORITHMS}.algorithm",
    "TokenValues": f"{_ALGORITHMS}.algorithm",
    "TokenView": f"{_ALGORITHMS}.algorithm",
    "GroupAdvantage": f"{_ALGORITHMS}.algorithm",
    "SampleCorrection": f"{_ALGORITHMS}.corrections",
    "Corrected": f"{_ALGORITHMS}.corrections",
    "sequence_sums": f"{_ALGORITHMS}.corrections",
    "group_relative": f"{_ALGORITHMS}.grpo",
    "clipped_surrogate": f"{_ALGORITHMS}.objective",
    "with_divergence": f"{_ALGORITHMS}.objective",
    "DispatchPolicy": f"{_DISPATCH}.order",
    "PlannedBatch": f"{_DISPATCH}.order",
    "Candidate": f"{_DISPATCH}.order",
    "Order": f"{_DISPATCH}.order",
    "in_order": f"{_DISPATCH}.order",
    "unmodelled": f"{_DISPATCH}.policies",
    "Tracker": _TRACKERS,
    "TrackedRun": _TRACKERS,
    "ScalarPoint": _TRACKERS,
    "ClipBounds": _CONTRACT,
    "ReferenceKl": _CONTRACT,
    "PluginOptions": "streamrl.spec.base",
}
"""Name -> its module."""


def __getattr__(name: str) -> object:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(NAMES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted(NAMES)
