"""Settings of the whole test suite."""

import asyncio
import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Tests run tiny models: threads of torch would only wait for each other, worst on a busy machine."""

settings.register_profile("streamrl", deadline=None)
settings.load_profile("streamrl")
"""No example is judged by the time that it takes: that says how busy the machine is."""


def pytest_configure() -> None:
    """Say that there is no event loop: pytest-asyncio would else make one to restore, and never close it."""
    asyncio.set_event_loop(None)
