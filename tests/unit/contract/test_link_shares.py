"""Shares of work and link are as good as brute force finds, keep every bound, and leave out who does not pay."""

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.link_shares import ClusterRates, LinkPlan, best_plan

GRID = 40

rates = st.builds(
    ClusterRates,
    sample_s=st.floats(0.01, 10),
    version_s=st.sampled_from([0.0, 0.1, 1.0, 20.0]),
    sample_bytes_s=st.sampled_from([0.0, 0.001, 0.05, 1.0]),
    most_link=st.sampled_from([0.1, 0.5, 1.0]),
)


def links_of(members: Sequence[ClusterRates]) -> Iterator[tuple[float, ...]]:
    """All of the grid that the bounds allow."""
    for cut in product(range(GRID + 1), repeat=len(members)):
        links = tuple(part / GRID for part in cut)
        if sum(links) <= 1 + 1e-9 and all(
            link <= one.most_link + 1e-9 for link, one in zip(links, members, strict=True)
        ):
            yield links


def seconds_in_turns(members: Sequence[ClusterRates], links: Sequence[float], samples: float) -> float:
    """All end together: L = (T p - w)/(a + c p), summed, is linear in T."""
    rate = fixed = 0.0
    for one, link in zip(members, links, strict=True):
        if not one.uses_link:
            rate += 1 / one.sample_s
        elif not link:
            return inf
        else:
            rate += link / (one.sample_bytes_s + one.sample_s * link)
            fixed += one.version_s / (one.sample_bytes_s + one.sample_s * link)
    step_s = (samples + fixed) / rate
    late = any(one.uses_link and one.version_s > step_s * link for one, link in zip(members, links, strict=True))
    return inf if late else step_s


def seconds_overlapped(members: Sequence[ClusterRates], links: Sequence[float], samples: float) -> float:
    """The least T with which the samples add up, by bisection."""

    def made(step_s: float) -> float:
        total = 0.0
        for one, link in zip(members, links, strict=True):
            free = step_s * link - one.version_s
            if free < -1e-12:
                return 0.0
            total += min(step_s / one.sample_s, free / one.sample_bytes_s if one.sample_bytes_s else inf)
        return total

    low, high = 0.0, 1e7
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if made(middle) >= samples else (middle, high)
    return high


def brute_force(clusters: Sequence[ClusterRates], samples: float, *, is_overlapped: bool) -> float:
    seconds = seconds_overlapped if is_overlapped else seconds_in_turns
    subsets = [chosen for size in range(1, len(clusters) + 1) for chosen in combinations(clusters, size)]
    return min(seconds(subset, links, samples) for subset in subsets for links in links_of(subset))


def check(plan: LinkPlan, clusters: dict[str, ClusterRates], *, samples: float, is_overlapped: bool) -> None:
    """Everybody is done in time with what the plan gives, and nothing is given twice."""
    assert sum(share.samples for share in plan.shares.values()) == pytest.approx(samples)
    assert sum(share.link for share in plan.shares.values()) <= 1 + 1e-9
    for name, one in clusters.items():
        share = plan.shares[name]
        assert 0 <= share.link <= one.most_link + 1e-9
        if not share.samples:
            continue
        made_s, sent_s = share.samples * one.sample_s, 0.0
        if one.uses_link:
            sent_s = (one.version_s + share.samples * one.sample_bytes_s) / share.link if share.link else inf
        took_s = max(made_s, sent_s) if is_overlapped else made_s + sent_s
        assert took_s <= plan.step_s * (1 + 1e-6)


@given(st.lists(rates, min_size=1, max_size=2), st.sampled_from([10.0, 1000.0]), st.booleans())
@settings(max_examples=80, deadline=None)
def test_as_good_as_brute_force(drawn, samples, is_overlapped):
    clusters = {f"c{number}": one for number, one in enumerate(drawn)}
    plan = best_plan(clusters, samples=samples, is_overlapped=is_overlapped)
    check(plan, clusters, samples=samples, is_overlapped=is_overlapped)
    assert plan.step_s <= brute_force(drawn, samples, is_overlapped=is_overlapped) * (1 + 1e-6)


@given(st.lists(rates, min_size=3, max_size=3))
@settings(max_examples=8, deadline=None)
def test_three_clusters_are_never_worse_than_brute_force_in_turns(drawn):
    clusters = {f"c{number}": one for number, one in enumerate(drawn)}
    plan = best_plan(clusters, samples=1000, is_overlapped=False)
    check(plan, clusters, samples=1000, is_overlapped=False)
    assert plan.step_s <= brute_force(drawn, 1000, is_overlapped=False) * (1 + 1e-6)


HOME = ClusterRates(sample_s=0.1)
NEAR = ClusterRates(sample_s=0.1, version_s=4.0, sample_bytes_s=0.001)


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_a_cluster_behind_a_thin_link_is_left_out(is_overlapped):
    thin = ClusterRates(sample_s=0.1, version_s=4.0, sample_bytes_s=0.001, most_link=0.02)
    plan = best_plan({"home": HOME, "near": NEAR, "thin": thin}, samples=1000, is_overlapped=is_overlapped)
    assert plan.shares["thin"].samples == plan.shares["thin"].link == 0
    assert plan.shares["near"].samples > 400
    assert plan.step_s == best_plan({"home": HOME, "near": NEAR}, samples=1000, is_overlapped=is_overlapped).step_s


def test_it_is_taken_where_steps_are_long():
    thin = ClusterRates(sample_s=0.1, version_s=4.0, sample_bytes_s=0.001, most_link=0.02)
    plan = best_plan({"home": HOME, "near": NEAR, "thin": thin}, samples=100_000, is_overlapped=True)
    assert plan.shares["thin"].samples > 0
    check(plan, {"home": HOME, "near": NEAR, "thin": thin}, samples=100_000, is_overlapped=True)


def test_one_of_two_equal_ones_may_be_better_than_both():
    """Two versions over one link take twice as long as one."""
    far = ClusterRates(sample_s=0.1, version_s=30.0)
    plan = best_plan({"a": far, "b": far}, samples=100, is_overlapped=False)
    assert [share.link for share in plan.shares.values()] == [1.0, 0.0]
    assert plan.step_s == pytest.approx(40.0)


def test_the_home_cluster_alone_takes_no_link():
    plan = best_plan({"home": HOME}, samples=50, is_overlapped=False)
    assert plan.step_s == pytest.approx(5.0)
    assert plan.shares["home"].link == 0


@pytest.mark.parametrize(
    ("clusters", "samples", "text"),
    [
        ({}, 1, "there must be 1 to 10 clusters, got 0"),
        ({"home": HOME}, 0, "samples must be above 0, got 0"),
    ],
)
def test_what_is_no_question_is_refused(clusters, samples, text):
    with pytest.raises(ValueError, match=text):
        best_plan(clusters, samples=samples, is_overlapped=False)


def test_rates_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="times of a cluster must be finite"):
        ClusterRates(sample_s=0)
    with pytest.raises(ValueError, match="most_link must be above 0 and at most 1, got 2"):
        ClusterRates(sample_s=1, most_link=2)
