"""`spec.trackers`: where experiments are followed beside the run's own files. No field holds a key: trackers read theirs from the environment."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from streamrl.spec.base import PythonClass, SpecModel

PROJECT_PATTERN = r"^[A-Za-z0-9][-A-Za-z0-9_.]*$"
SERVER_PATTERN = r"^https?://[^@\s]+$"
Project = Annotated[str, StringConstraints(pattern=PROJECT_PATTERN, max_length=64)]
"""What all trackers take as a name."""


class WandbTracker(SpecModel):
    """Weights & Biases. Reads `WANDB_API_KEY`, and `WANDB_BASE_URL` for a server of one's own."""

    project: Project = Field(default="streamrl", description="Project.")
    entity: Project | None = Field(default=None, description="User or team; absent = the key's own.")
    mode: Literal["Online", "Offline"] = Field(
        default="Online", description="Offline: files in the run folder, for `wandb sync` later."
    )


class TensorBoardTracker(SpecModel):
    """Event files in the run folder."""


class MlflowTracker(SpecModel):
    """MLflow. Reads `MLFLOW_TRACKING_USERNAME`, `MLFLOW_TRACKING_PASSWORD`, `MLFLOW_TRACKING_TOKEN`."""

    tracking_uri: Annotated[str, StringConstraints(pattern=SERVER_PATTERN, max_length=2048)] | None = Field(
        default=None, description="Server, without credentials; absent = files in the run folder."
    )
    experiment: Project = Field(default="streamrl", description="Experiment.")


class TrackioTracker(SpecModel):
    """Trackio's local database: in `TRACKIO_DIR`, or in the run folder. `trackio sync` brings it to a Space."""

    project: Project = Field(default="streamrl", description="Project.")


class Trackers(SpecModel):
    """Experiment trackers, each in a process of its own that no run waits for. Each is off until it is named: `tensorBoard: {}`."""

    wandb: WandbTracker | None = Field(default=None, description="Weights & Biases.")
    tensor_board: TensorBoardTracker | None = Field(default=None, description="TensorBoard.")
    mlflow: MlflowTracker | None = Field(default=None, description="MLflow.")
    trackio: TrackioTracker | None = Field(default=None, description="Trackio.")
    python: PythonClass | None = Field(default=None, description="A class of your own, or of an installed package.")
    sample_interval_steps: int = Field(
        default=10,
        ge=0,
        le=1_000_000,
        description="Steps between tables of samples, of which storage.archive has the texts; 0 = none.",
    )

    def named(self) -> dict[str, SpecModel]:
        """Those that are on, by the key that users write."""
        found = {str(field.alias): getattr(self, name) for name, field in type(self).model_fields.items()}
        return {key: one for key, one in found.items() if isinstance(one, SpecModel)}

    @classmethod
    def choices(cls) -> tuple[str, ...]:
        """Keys of all of them as users write them."""
        return tuple(str(field.alias) for name, field in cls.model_fields.items() if name != "sample_interval_steps")
