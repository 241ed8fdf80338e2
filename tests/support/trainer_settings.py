"""TrainerSettings of a trainer process that is not started."""

from pathlib import Path

from streamrl.spec import RLJobSpec
from streamrl.spec.rljob import Metadata
from streamrl_workers.trainer.settings import TrainerSettings


def trainer_settings(spec: RLJobSpec) -> TrainerSettings:
    """Of this job, with nothing around it."""
    return TrainerSettings(
        run_dir=Path(),
        store=Path(),
        process="trainer-0",
        spec=spec,
        metadata=Metadata(name="job"),
        scheduler_address="",
        weights_port=0,
        signals_port=0,
        token="",
        model_path=None,
        base_dir=Path(),
        threads=None,
    )
