"""What a trainer process is made of: its window, its last sample."""

from pathlib import Path

import pytest

from streamrl.spec import parse_job
from streamrl_workers.metrics.recorder import Recorder
from streamrl_workers.metrics.sink import BubbleSink, Source
from streamrl_workers.scheduler.shell.link import LIMIT_BYTES
from streamrl_workers.trainer.main import _close
from streamrl_workers.trainer.settings import Settings
from support.jobs import simulated_job
from support.trainer_settings import trainer_settings


def settings(*, group_size: int, max_tokens: int) -> Settings:
    job = simulated_job()
    job["spec"]["task"] |= {"groupSize": group_size, "sampling": {"maxTokens": max_tokens}}
    return trainer_settings(parse_job(job).spec)


@pytest.mark.parametrize(
    ("group_size", "max_tokens", "window_mib"), [(8, 64, 32), (64, 32_768, 64), (64, 98_304, 96), (1024, 1_048_576, 96)]
)
def test_the_window_stays_below_what_the_scheduler_keeps_for_a_peer(
    *, group_size: int, max_tokens: int, window_mib: int
) -> None:
    window_bytes = settings(group_size=group_size, max_tokens=max_tokens).window_bytes
    assert window_bytes == window_mib * 2**20
    assert window_bytes < LIMIT_BYTES


def test_a_last_sample_that_cannot_be_written_is_logged_only(caplog: pytest.LogCaptureFixture) -> None:
    sink = BubbleSink(Path("/dev/full"), source=Source(process="trainer-0", role="trainer", instance="i"))
    _close(Recorder(sink=sink, metrics=None))
    sink.close()
    assert "/dev/full: cannot be written: No space left on device" in caplog.text
