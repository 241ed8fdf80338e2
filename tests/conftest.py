"""Settings of the whole test suite."""

import asyncio


def pytest_configure() -> None:
    """Say that there is no event loop: pytest-asyncio would else make one to restore, and never close it."""
    asyncio.set_event_loop(None)
