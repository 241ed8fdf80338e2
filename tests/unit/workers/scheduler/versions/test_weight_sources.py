"""From whom each generator pulls: tables, and what holds whatever happens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.versions.sources import WeightPeer, WeightSources, choose_sources


def peer(name: str) -> WeightPeer:
    """`b2`: of cluster b, which serves; `b2-`: does not; `2`: at home."""
    cluster = name[0] if name[0].isalpha() else ""
    return WeightPeer(generator_id=name, cluster=cluster, address="" if name.endswith("-") else f"at-{name}")


@pytest.mark.parametrize(
    ("order", "sources"),
    [
        ("", {}),
        ("a0", {"a0": None}),
        ("a0 a1 a2", {"a0": None, "a1": "a0", "a2": "a1"}),
        ("0 a0 1 a1", {"0": None, "a0": None, "1": "0", "a1": "a0"}),
        ("a0- a1- a2-", {"a0-": None, "a1-": None, "a2-": None}),
        ("a0- a1 a2- a3 a4-", {"a1": None, "a3": "a1", "a0-": "a1", "a2-": "a3", "a4-": "a1"}),
        ("a0- b1", {"a0-": None, "b1": None}),
    ],
)
def test_one_of_a_cluster_pulls_from_the_trainer(order: str, sources: dict[str, str | None]) -> None:
    found = choose_sources([peer(name) for name in order.split()])
    assert {name: source and source.generator_id for name, source in found.items()} == sources


def joined(sources: WeightSources, name: str) -> None:
    one = peer(name)
    sources.joined(pb.GeneratorHello(generator_id=name, cluster=one.cluster, weights_address=one.address))


def row(sources: WeightSources, names: str) -> list[str | None]:
    return [source and source.generator_id for source in map(sources.of, names.split())]


def test_who_brings_nothing_is_put_behind_the_others() -> None:
    sources = WeightSources()
    for name in ("a0", "a1", "a2"):
        joined(sources, name)
    sources.stalled("a2")  # a1 may be frozen
    assert row(sources, "a0 a2 a1") == [None, "a0", "a2"]
    sources.stalled("a0")  # cannot reach the trainer
    assert row(sources, "a2 a1 a0") == [None, "a2", "a1"]


def test_who_waits_himself_is_not_blamed() -> None:
    sources = WeightSources()
    for name in ("a0", "a1", "a2"):
        joined(sources, name)
    sources.stalled("a1")
    assert row(sources, "a1 a2 a0") == [None, "a1", "a2"]
    sources.stalled("a1")  # from the trainer now
    assert row(sources, "a2 a0 a1") == [None, "a2", "a0"]
    sources.stalled("a2")  # nor has it
    assert row(sources, "a0 a1 a2") == [None, "a0", "a1"]
    sources.stalled("a0")
    sources.advanced("a1")
    sources.stalled("a2")  # a1, which waits for nobody
    assert row(sources, "a2 a0 a1") == [None, "a2", "a0"]


def test_the_source_that_leaves_is_replaced_by_its_own() -> None:
    sources = WeightSources()
    for name in ("a0", "a1", "a2"):
        joined(sources, name)
    sources.left("a0")
    assert row(sources, "a1 a2") == [None, "a1"]
    joined(sources, "a0")
    assert row(sources, "a1 a2 a0") == [None, "a1", "a2"]


NAMES = [f"{cluster}{number}{serves}" for cluster in ("", "a", "b") for number in range(6) for serves in ("", "-")]
EVENTS = st.tuples(st.sampled_from(["joined", "left", "stalled", "advanced"]), st.sampled_from(NAMES))


@given(st.lists(EVENTS, max_size=60))
def test_every_cluster_takes_each_byte_once_and_everybody_is_reached(events: list[tuple[str, str]]) -> None:
    sources, there = WeightSources(), set[str]()
    for event, name in events:
        if event == "joined" and name not in there:
            joined(sources, name)
            there.add(name)
        elif event != "joined":
            getattr(sources, event)(name)
            there -= {name} if event == "left" else set()
        found = {one: sources.of(one) for one in there}
        for cluster in {peer(one).cluster for one in there}:
            members = [one for one in there if peer(one).cluster == cluster]
            roots = [one for one in members if found[one] is None]
            assert len(roots) == 1 if any(peer(one).address for one in members) else roots == members
        for one, first in found.items():
            seen, source = {one}, first
            while source is not None:
                assert source.generator_id in there - seen
                assert source.cluster == peer(one).cluster
                assert source.address
                seen.add(source.generator_id)
                source = found[source.generator_id]


@given(st.integers(1, 200))
def test_nobody_sends_many_copies_and_no_row_is_long(count: int) -> None:
    sources = choose_sources([peer(f"a{number}") for number in range(count)])
    served = [source.generator_id for source in sources.values() if source is not None]
    assert max((served.count(name) for name in set(served)), default=0) <= 3
    depths = {"a0": 0}
    for number in range(1, count):
        source = sources[f"a{number}"]
        assert source is not None
        depths[f"a{number}"] = depths[source.generator_id] + 1
    assert max(depths.values()) <= 7 + max(0, (count // 8).bit_length())
