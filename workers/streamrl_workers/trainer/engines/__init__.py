"""The engines by name, as in `trainer.engine` of an RLJob.

Creators import their engine when called: the simulated engine never loads torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamrl.spec import RLJobSpec
from streamrl_workers.trainer.engine import TrainEngine
from streamrl_workers.trainer.engines.place import ALONE, Place

if TYPE_CHECKING:
    from streamrl_workers.trainer.engines.linked_ranks import LinkedRanks


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """What an engine is built from."""

    spec: RLJobSpec
    model_path: str | None  # directory or hub name; the simulated engine needs none
    threads: int | None  # of torch; None = torch's choice
    place: Place = ALONE
    ranks: "LinkedRanks | None" = None  # all ranks, as rank 0 reaches them; None: there is one, or this is another


def create_torch(setup: EngineSetup) -> TrainEngine:
    """Real training."""
    from streamrl_workers.trainer.engines.create import create

    return create(setup)


def create_simulated(setup: EngineSetup) -> TrainEngine:
    """A trainer that only takes time."""
    from streamrl_workers.trainer.engines.simulated import SimulatedEngine

    return SimulatedEngine(spec=setup.spec.trainer.engine.value, seed=setup.spec.seed)


ENGINES: dict[str, Callable[[EngineSetup], TrainEngine]] = {"torch": create_torch, "simulated": create_simulated}


def engine_creator(name: str) -> Callable[[EngineSetup], TrainEngine]:
    """Look up an engine; an unknown name lists the known."""
    if name not in ENGINES:
        raise ValueError(f"engine {name!r} is unknown, known are: {', '.join(sorted(ENGINES))}")
    return ENGINES[name]
