"""A variable of ours that is set to nothing is as one that is not set: the operator keeps others' keys away so."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from streamrl import keys
from streamrl_workers.generator.settings import read_settings as read_generator
from streamrl_workers.scheduler.settings import SchedulerEnvironment
from streamrl_workers.trainer.settings import read_settings as read_trainer
from support.jobs import simulated_job

OURS = {value for name, value in vars(keys).items() if name.startswith("ENV_") and value.startswith("STREAMRL_")}


@pytest.mark.parametrize("read", [read_generator, read_trainer, SchedulerEnvironment.read])
def test_blank_is_absent(read: Callable[[Mapping[str, str]], object], tmp_path: Path) -> None:
    (tmp_path / keys.FILE_JOB).write_text(json.dumps(simulated_job()))
    needed = {
        keys.ENV_RUN_DIR: str(tmp_path),
        keys.ENV_PROCESS: "scheduler",
        keys.ENV_POOL: "sim",
        keys.ENV_SCHEDULER_ADDRESS: "localhost:1",
        keys.ENV_TOKEN: "t",
    }
    assert len(OURS - set(needed)) > 20
    assert read({**dict.fromkeys(OURS, ""), **needed}) == read(needed)
