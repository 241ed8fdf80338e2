"""Seconds of a version by part: each formula in a row, with a model of 8.19 billion parameters."""

from typing import Any

import pytest

from streamrl.latency import LatencyCurve
from streamrl.spec import parse_job
from streamrl_operator.planning.estimate import estimate
from streamrl_operator.planning.weight_times import RATES, MeasuredPool, PoolTimes, WeightTimes, weight_times
from support.jobs import simulated_job
from support.planned import full_document
from unit.operator.planning.test_estimate import QWEN3_8B, QWEN3_30B_A3B

N = 8_190_735_360
VERSION = 2 * N  # bytes in bfloat16
SLOTS, TOKENS = 8, 64 + 1024
MEASURED = {"g": MeasuredPool(curve=LatencyCurve((1, 8), (0.01, 0.02)), fill_s=0.5)}


def times(
    *,
    trainer: dict[str, Any] | None = None,
    pool: dict[str, Any] | None = None,
    http: dict[str, Any] | None = None,
    config: dict[str, Any] = QWEN3_8B,
    measured: dict[str, MeasuredPool] | None = None,
    **spec: Any,
) -> tuple[WeightTimes, PoolTimes]:
    """One version of a job with one pool."""
    document = full_document()
    given = {"name": "g", "engine": {"hf": {"slots": SLOTS}}} | (pool or {})
    document["spec"]["trainer"] = {"processesPerNode": 4, "precision": "BF16"} | (trainer or {})
    document["spec"] |= {"generators": [given], "weights": {"http": http or {}}} | spec
    job = parse_job(document)
    found = weight_times(job, known=estimate(job, config=config), measured=measured)
    assert found is not None
    return found, found.pools[0]


@pytest.mark.parametrize(
    ("changes", "copy_s", "publish_s"),
    [
        ({}, VERSION / 4 / 25e9, VERSION / 4 / 5.8e9),
        ({"trainer": {"processesPerNode": 8, "nodes": 2}}, VERSION / 16 / 25e9, VERSION / 16 / 5.8e9),
        ({"trainer": {"precision": "FP32"}}, 2 * VERSION / 4 / 25e9, 2 * VERSION / 4 / 5.8e9),
        ({"http": {"deltas": True}}, VERSION / 4 / 25e9, VERSION / 4 / 5.8e9 + VERSION / 4 / 0.4e9),
        ({"weights": {"folder": {"url": "/mnt/w"}}}, VERSION / 4 / 25e9, VERSION / 4 / 5.8e9 + VERSION / 4 / 0.2e9),
    ],
    ids=["four ranks", "sixteen ranks", "float32", "deltas", "folder"],
)
def test_a_rank_copies_hashes_and_makes_its_share(changes: dict[str, Any], copy_s: float, publish_s: float) -> None:
    found, _ = times(**changes)
    assert (found.copy_s, found.publish_s) == (pytest.approx(copy_s, rel=0.001), pytest.approx(publish_s, rel=0.001))
    assert found.trainer_stall_s(step_s=60.0) == found.copy_s, "the rest goes on while the next step does"
    assert found.trainer_stall_s(step_s=0.0) == pytest.approx(copy_s + publish_s, rel=0.001)


@pytest.mark.parametrize(
    ("changes", "pull_s", "whole_s"),
    [
        ({}, VERSION / 0.83e9, VERSION / 0.83e9),
        ({"http": {"uplinkBytesPerSecond": "10M"}}, VERSION / 0.83e9, VERSION / 0.83e9),
        ({"pool": {"clusterName": "east"}, "http": {"uplinkBytesPerSecond": "100M"}}, VERSION / 1e8, VERSION / 1e8),
        (
            {
                "pool": {"clusterName": "east"},
                "http": {"remoteBytesPerSecond": "25M", "uplinkBytesPerSecond": "100M", "deltas": True},
            },
            0.05 * VERSION / 25e6 + VERSION / 0.7e9,
            VERSION / 25e6,
        ),
        ({"weights": {"folder": {"url": "/mnt/w"}}}, VERSION / 0.12e9, VERSION / 0.12e9),
    ],
    ids=["at home", "a bound of other clusters", "uplink", "deltas beside the link", "folder"],
)
def test_a_pull_takes_what_the_link_or_the_generator_needs(
    changes: dict[str, Any], pull_s: float, whole_s: float
) -> None:
    _, pool = times(**changes)
    assert (pool.pull_s, pool.whole_s) == (pytest.approx(pull_s, rel=0.001), pytest.approx(whole_s, rel=0.001))


@pytest.mark.parametrize(
    ("changes", "pause_s", "loaded_bytes", "cache_s"),
    [
        ({}, 0.05, VERSION, N * SLOTS * TOKENS / 4e14),
        (
            {"pool": {"engine": {"vllm": {"maxConcurrency": SLOTS, "tensorParallelSize": 4}}}},
            *(0.05, VERSION / 4, N * SLOTS * TOKENS / 4 / 4e14),
        ),
        ({"pool": {"engine": {"hf": {"slots": SLOTS, "kvCacheBytes": "73728000"}}}}, 0.05, VERSION, N * 500 / 4e14),
        ({"measured": MEASURED}, 0.02, VERSION, 0.5 * SLOTS),
        ({"config": QWEN3_30B_A3B | {"num_experts_per_tok": 8}}, 0.05, 2 * 30.5e9, 3.3e9 * SLOTS * TOKENS / 4e14),
    ],
    ids=["one device", "four devices", "little memory", "a profile", "experts"],
)
def test_generation_stands_still_from_the_pause_to_the_cache(
    changes: dict[str, Any], pause_s: float, loaded_bytes: float, cache_s: float
) -> None:
    found, pool = times(**changes)
    parts = (pool.pause_s, pool.copy_s, pool.load_s, pool.cache_s)
    expected = (pause_s, loaded_bytes / 25e9, loaded_bytes / 1e12, cache_s)
    assert parts == tuple(pytest.approx(value, rel=0.03) for value in expected)
    assert found.stall_s(pool) == pytest.approx(sum(parts))


def test_adapters_alone_are_loaded_where_the_engine_computes_them() -> None:
    _, beside = times(trainer={"lora": {"rank": 16}}, pool={"engine": {"vllm": {"maxConcurrency": SLOTS}}})
    _, merged = times(trainer={"lora": {"rank": 16}, "precision": "FP32"})
    assert beside.copy_s < 0.01
    assert merged.copy_s == pytest.approx(2 * VERSION / RATES.pinned_copy, rel=0.001)


def test_without_staleness_generation_waits_for_the_version() -> None:
    pipeline = {"batchGroups": 4, "steps": 10, "mode": "StreamSync"}
    found, pool = times(pipeline=pipeline)
    assert found.stall_s(pool) == pytest.approx(pool.stall_s + found.copy_s + found.publish_s + pool.pull_s)


def test_nothing_is_said_of_a_model_that_is_not_known() -> None:
    for document in (full_document(), simulated_job()):
        job = parse_job(document)
        assert weight_times(job, known=estimate(job)) is None
