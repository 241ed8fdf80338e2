"""What a trainer process measures of itself."""

from pathlib import Path

import pytest

from streamrl_workers.metrics.bubbles import BubbleSink, Recorder
from streamrl_workers.trainer.status import close_recorder


def test_a_last_sample_that_cannot_be_written_is_logged_only(caplog: pytest.LogCaptureFixture) -> None:
    sink = BubbleSink(Path("/dev/full"), process="trainer-0", role="trainer", instance="i")
    close_recorder(Recorder(sink=sink, metrics=None))
    sink.close()
    assert "/dev/full: cannot be written: No space left on device" in caplog.text
