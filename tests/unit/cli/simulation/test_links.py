"""Transfers to other clusters: equal shares of a full link, one copy for each cluster, and turns where the job names its uplink."""

from collections.abc import Callable
from typing import Any

import pytest

from streamrl.proto import stream_pb2 as pb
from streamrl_cli.simulation.clock import VirtualClock
from streamrl_cli.simulation.links import Uplink
from streamrl_cli.simulation.results import steady_step_s
from streamrl_cli.simulation.scenario import Scenario
from streamrl_cli.simulation.world import simulate


@pytest.mark.parametrize(
    ("asked", "ends"),
    [
        ([(0, "a", 100)], {"a": 10}),
        ([(0, "a", 2)], {"a": 50}),  # its own link
        ([(0, "a", 100), (0, "b", 100)], {"a": 20, "b": 20}),
        ([(0, "a", 100), (5, "b", 100)], {"a": 15, "b": 20}),
        ([(0, "a", 100), (0, "b", 2)], {"a": 12.5, "b": 50}),  # what b leaves is a's
        ([(0, "a", 100), (5, "a", 100)], {"a": 10}),  # one copy for both
        ([(0, "a", 100), (30, "a", 100)], {"a": 30}),  # it is there already
    ],
)
def test_equal_shares(asked: list[tuple[float, str, float]], ends: dict[str, float]) -> None:
    timeline, found = VirtualClock(), {}
    uplink = Uplink(timeline, bytes_per_s=10.0)
    version = pb.VersionName(attempt=1, step=1, hash=b"simulated")
    for at_s, cluster, most in asked:

        def fetch(_: object, cluster: str = cluster, most: float = most) -> None:
            def came(_: pb.VersionName) -> None:
                found[cluster] = timeline.now_s

            uplink.fetch(version, cluster=cluster, size_bytes=100, most_bytes_per_s=most, then=came)

        timeline.at(at_s, fetch)
    while timeline.coming:
        timeline.step()
    assert found == pytest.approx(ends)


@pytest.mark.parametrize("mode", ["StreamSync", "StreamAsync"])
def test_turns_on_a_full_uplink_are_faster_than_shares(make: Callable[..., Scenario], plain: Any, mode: str) -> None:
    pool = plain()["pools"][0] | {"slots": 8}
    pools = [pool | {"name": "home"}, *(pool | {"name": name, "clusterName": name} for name in "abc")]

    def step_s(*, in_turn: bool) -> float:
        found = make(
            pools=pools,
            pipeline={"mode": mode, "batchGroups": 24, "steps": 10},
            lengths={"logNormal": {"medianTokens": 200, "sigma": 0.5}},
            trainer={"secondsPerToken": 1e-5, "weightBytes": 2000, "uplink": "100", "uplinkInTurn": in_turn},
        )
        return steady_step_s(simulate(found).steps)

    assert step_s(in_turn=True) < 0.95 * step_s(in_turn=False)
