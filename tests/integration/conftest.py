"""What every integration test cleans up after itself, also when it fails."""

from collections.abc import Iterator

import pytest

from support.runs import DEADLINE_S, STARTED


@pytest.fixture(autouse=True)
def no_run_outlives_its_test() -> Iterator[None]:
    """A run that a failed test left behind would be a child of this process that other tests trip over."""
    yield
    while STARTED:
        process = STARTED.pop()
        process.kill()
        process.wait(DEADLINE_S)
