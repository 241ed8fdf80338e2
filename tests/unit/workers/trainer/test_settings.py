"""What a trainer process is told: its rank, as torchrun's variables say it; its window."""

import pytest

from streamrl.errors import UserError
from streamrl.spec import parse_job
from streamrl_workers.scheduler.server.connections import LIMIT_BYTES
from streamrl_workers.trainer.engines.engine import RankEnvironment
from streamrl_workers.trainer.settings import TrainerSettings, read_rank_environment
from support.jobs import simulated_job
from support.trainer_settings import trainer_settings

MASTER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, RankEnvironment()),
        ({"RANK": "0", "WORLD_SIZE": "1"}, RankEnvironment()),
        (
            {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", **MASTER},
            RankEnvironment(rank=3, local_rank=1, size=4, host="127.0.0.1", port=29500),
        ),
        ({"WORLD_SIZE": "2", **MASTER}, RankEnvironment(size=2, host="127.0.0.1", port=29500)),
    ],
)
def test_a_ranks_environment_is_read(environ: dict[str, str], expected: RankEnvironment) -> None:
    assert read_rank_environment(environ) == expected


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2", **MASTER}, r"^RANK: must be below WORLD_SIZE \(2\), got 2"),
        ({"RANK": "1"}, r"^RANK: must be below WORLD_SIZE \(1\), got 1"),
        ({"WORLD_SIZE": "0"}, r"^RANK: must be below WORLD_SIZE \(0\), got 0"),
        ({"RANK": "-1", "WORLD_SIZE": "2", **MASTER}, "^RANK: must be a whole number"),
        ({"WORLD_SIZE": "2", "MASTER_PORT": "1"}, "^MASTER_ADDR: must be set"),
        (
            {"WORLD_SIZE": "2", "MASTER_ADDR": "host"},
            "^MASTER_PORT: must be a port from 1 to 65535 with WORLD_SIZE above 1",
        ),
    ],
)
def test_a_rank_that_cannot_be_is_the_users_error(environ: dict[str, str], text: str) -> None:
    with pytest.raises(UserError, match=text):
        read_rank_environment(environ)


def settings(*, group_size: int, max_tokens: int) -> TrainerSettings:
    job = simulated_job()
    job["spec"]["task"] |= {"groupSize": group_size, "sampling": {"maxTokens": max_tokens}}
    return trainer_settings(parse_job(job).spec)


@pytest.mark.parametrize(
    ("group_size", "max_tokens", "window_mib"), [(8, 64, 32), (64, 32_768, 64), (64, 98_304, 96), (1024, 1_048_576, 96)]
)
def test_the_window_stays_below_what_the_scheduler_keeps_for_a_peer(
    *, group_size: int, max_tokens: int, window_mib: int
) -> None:
    window_bytes = settings(group_size=group_size, max_tokens=max_tokens).window_bytes
    assert window_bytes == window_mib * 2**20
    assert window_bytes < LIMIT_BYTES


@pytest.mark.parametrize(
    ("staleness", "newest", "expected"),
    [(0, 0, [0]), (0, 3, [3]), (0, 4, [4]), (0, 5, [5]), (2, 5, [4, 5]), (2, 6, [4, 6]), (2, 7, [7]), (2, 10, [8, 10])],
)
def test_the_announced_version_stays_and_one_that_an_evaluation_may_hold(
    staleness: int, newest: int, expected: list[int]
) -> None:
    spec = parse_job(simulated_job()).spec
    evaluation = spec.task.evaluation.model_copy(update={"interval_steps": 4})
    task = spec.task.model_copy(update={"evaluation": evaluation})
    pipeline = spec.pipeline.model_copy(update={"max_staleness_steps": staleness, "steps": 100})
    settings = trainer_settings(spec.model_copy(update={"task": task, "pipeline": pipeline}))
    assert [step for step in range(newest + 1) if settings.is_needed(step, newest=newest)] == expected
