"""Settings of the whole test suite."""

import asyncio
import os
from collections.abc import Iterator

import pytest
from hypothesis import Phase, settings

from support.runs import DEADLINE_S, STARTED

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Tests run tiny models: threads of torch would only wait for each other, worst on a busy machine."""

_PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)
settings.register_profile("streamrl", deadline=None, print_blob=True, phases=_PHASES)
settings.load_profile("streamrl")
"""No example is judged by the time that it takes: that says how busy the machine is. What fails is told with what repeats it. Not explained
line by line: on a slow machine that took longer than a test may, and the time limit hid the failure."""


def pytest_configure() -> None:
    """Say that there is no event loop: pytest-asyncio would else make one to restore, and never close it."""
    asyncio.set_event_loop(None)


@pytest.fixture(autouse=True)
def no_run_outlives_its_test() -> Iterator[None]:
    """A run that a failed test left behind would be a child of this process that other tests trip over."""
    yield
    while STARTED:
        process = STARTED.pop()
        process.kill()
        process.wait(DEADLINE_S)
