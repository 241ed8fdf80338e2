"""Settings of the whole test suite."""

import asyncio
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Tests run tiny models: threads of torch would only wait for each other, worst on a busy machine."""


def pytest_configure() -> None:
    """Say that there is no event loop: pytest-asyncio would else make one to restore, and never close it."""
    asyncio.set_event_loop(None)
