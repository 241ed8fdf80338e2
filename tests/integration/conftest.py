"""What several files of real processes share."""

from collections.abc import Iterator

import pytest

from support.endpoints import judge, serving


@pytest.fixture
def judge_url() -> Iterator[str]:
    """Where a model answers that judges."""
    with serving(judge) as endpoint:
        yield endpoint.url
