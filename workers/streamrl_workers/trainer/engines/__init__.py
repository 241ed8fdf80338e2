"""The engines by name, as in `trainer.engine` of an RLJob.

Creators import their engine when called: the simulated engine never loads torch.
"""

from collections.abc import Callable

from streamrl_workers.trainer.engines.engine import TrainEngine
from streamrl_workers.trainer.engines.setup import EngineSetup


def create_torch(setup: EngineSetup) -> TrainEngine:
    """Real training."""
    from streamrl_workers.trainer.engines.torch_engine import create

    return create(setup)


def create_simulated(setup: EngineSetup) -> TrainEngine:
    """A trainer that only takes time."""
    from streamrl_workers.trainer.engines.simulated import SimulatedTrainEngine

    return SimulatedTrainEngine(spec=setup.spec.trainer.engine.value, seed=setup.spec.seed)


ENGINES: dict[str, Callable[[EngineSetup], TrainEngine]] = {"torch": create_torch, "simulated": create_simulated}


def create_engine(setup: EngineSetup) -> TrainEngine:
    """The engine that the job chose."""
    return ENGINES[setup.spec.trainer.engine.key](setup)
