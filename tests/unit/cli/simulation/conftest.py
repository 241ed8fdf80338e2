"""Small scenarios, as plain data and as models."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from streamrl_cli.simulation.reading import parse_scenario
from streamrl_cli.simulation.scenario import Scenario

Make = Callable[..., Scenario]

SMALL: dict[str, Any] = {
    "groupSize": 2,
    "pipeline": {"mode": "StreamSync", "batchGroups": 1, "steps": 1},
    "pools": [
        {
            "name": "p",
            "slots": 2,
            "latency": [{"batch": 1, "milliseconds": 10}, {"batch": 2, "milliseconds": 20}],
            "startSeconds": 1,
        }
    ],
    "lengths": {"table": {"rows": [[10, 30]]}},
    "trainer": {"secondsPerToken": 0.001, "secondsPerStep": 0.5},
}
"""One generator with two slots, one group of two samples: 10 and 30 tokens."""


def small(**changes: Any) -> dict[str, Any]:
    """`SMALL` with other sections; a mapping is merged into its section, `pool` into the first pool."""
    document = deepcopy(SMALL)
    document["pools"][0] |= changes.pop("pool", {})
    for name, value in changes.items():
        merged = isinstance(value, dict) and name in document and name != "lengths"
        document[name] = document[name] | value if merged else value
    return document


@pytest.fixture(scope="session")
def plain() -> Callable[..., dict[str, Any]]:
    """Makes plain data."""
    return small


@pytest.fixture(scope="session")
def make() -> Make:
    """Makes scenarios."""
    return lambda **changes: parse_scenario(small(**changes))
