"""The environments by the key that users write; `open_environment` is the door."""

from collections.abc import Callable
from pathlib import Path

from streamrl.spec.task import EnvironmentSpec
from streamrl_workers.environments import python_function
from streamrl_workers.environments.base import EnvironmentSource, MakeEnvironment

ENVIRONMENTS: dict[str, Callable[..., MakeEnvironment]] = {"python": python_function.create}


def open_environment(spec: EnvironmentSpec | None, *, seed: int, base_dir: Path) -> EnvironmentSource | None:
    """The environment of a job with this seed; None if it has none. Raises `UserError` for a bad function."""
    if spec is None:
        return None
    make = ENVIRONMENTS[spec.key](spec.value, field=f"spec.task.environment.{spec.key}", base_dir=base_dir)
    return EnvironmentSource(
        make=make, seed=seed, max_observation_chars=spec.max_observation_chars, max_turns=spec.max_turns
    )
