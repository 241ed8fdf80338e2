"""What the core reads out of a job."""

import pytest

from streamrl.spec import parse_job
from streamrl_workers.scheduler.settings import ROW_BYTES, SchedulerSettings


def job_settings(**spec) -> SchedulerSettings:
    document = {
        "apiVersion": "streamrl.io/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "j"},
        "spec": {
            "model": {"scratch": {}},
            "task": {
                "dataset": {"jsonl": {"path": "x.jsonl"}},
                "sampling": {"maxTokens": 5},
                "rewards": [{"name": "r", "exactMatch": {}}],
            },
            "pipeline": {"batchGroups": 4, "steps": 9},
            "generators": [{"name": "p", "engine": {"hf": {}}}],
            **spec,
        },
    }
    return SchedulerSettings.from_job(parse_job(document).spec)


def test_settings_from_a_job():
    found = job_settings()
    assert (found.batch_groups, found.staleness, found.steps, found.group_size) == (4, 1, 9, 8)
    assert (found.dispatch.policy, found.dispatch.length_signals, found.prompt_look_ahead) == (
        "longestFirst",
        ("History", "Siblings"),
        64,
    )
    assert found.max_buffer_bytes == 256 * 2**20
    assert found.extensions.draws_per_step == 1


def test_rows_with_answers_are_held_ready_within_the_buffer():
    bounded = {"scheduling": {"maxBufferBytes": "1Ki"}, "algorithm": {"supervised": {}}}
    task = {"dataset": {"jsonl": {"path": "x.jsonl"}}, "sampling": {"maxTokens": 5}, "groupSize": 1, "rewards": []}
    pipeline = {"mode": "StreamSync", "batchGroups": 4, "steps": 9}
    found = job_settings(task=task, pipeline=pipeline, generators=[], **bounded)
    assert found.prompt_look_ahead * found.tasks.max_tokens * ROW_BYTES <= 1024 < 64 * 5 * ROW_BYTES


@pytest.mark.parametrize(
    ("mode", "staleness", "whole_batches", "turns"),
    [
        ("StreamSync", 0, False, False),
        ("StreamAsync", 1, False, False),
        ("Batch", 0, True, False),
        ("Colocated", 0, True, True),
    ],
)
def test_a_mode_is_two_answers_and_a_staleness(mode, staleness, whole_batches, turns):
    found = job_settings(pipeline={"mode": mode, "batchGroups": 4, "steps": 9})
    assert (found.staleness, found.delivery.whole_batches, found.extensions.colocated) == (
        staleness,
        whole_batches,
        turns,
    )


@pytest.mark.parametrize(
    ("mode", "devices", "lent"),
    [
        ("StreamSync", {"a": None, "b": "Own"}, ""),
        ("StreamAsync", {"a": None, "b": "Trainer"}, "b"),
        ("Batch", {"a": "Trainer", "b": "Own"}, "a"),
        ("Colocated", {"a": None, "b": "Trainer"}, "ab"),
    ],
)
def test_colocated_is_the_mode_whose_pools_are_all_on_the_trainers_devices(mode, devices, lent):
    pools = [{"name": name, "engine": {"hf": {}}, **({"devices": on} if on else {})} for name, on in devices.items()]
    found = job_settings(pipeline={"mode": mode, "batchGroups": 4, "steps": 9}, generators=pools)
    assert (found.extensions.shared_pools, found.extensions.colocated) == (frozenset(lent), mode == "Colocated")


@pytest.mark.parametrize(
    ("algorithm", "draws"),
    [
        ({"grpo": {}}, 1),
        ({"dapo": {}}, 4),
        ({"dapo": {"dynamicSampling": {"maxDrawsPerStep": 2}}}, 2),
    ],
)
def test_an_algorithm_with_dynamic_sampling_draws_again(algorithm, draws):
    assert job_settings(algorithm=algorithm).extensions.draws_per_step == draws


@pytest.mark.parametrize(
    ("pipeline", "partial"), [({}, True), ({"partialRollouts": False}, False), ({"delivery": "Logical"}, False)]
)
def test_versions_take_turns_on_the_uplink_where_a_sample_may_go_on_under_another(pipeline, partial):
    found = job_settings(
        pipeline={"mode": "StreamSync", "batchGroups": 4, "steps": 9, **pipeline},
        weights={"http": {"uplinkBytesPerSecond": "1Mi"}},
        generators=[{"name": "p", "engine": {"hf": {"slots": 1}}}],
    )
    assert (found.partial_rollouts, found.extensions.shares_uplink) == (partial, partial)
