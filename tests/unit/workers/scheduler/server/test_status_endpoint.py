"""What the scheduler tells of rewards, failed scores and dropped groups: step lines, `/numbers`, Prometheus."""

import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import get_args

import pytest

from streamrl.metrics import SCHEDULER
from streamrl.mixture import Mixture
from streamrl.proto import stream_pb2 as pb
from streamrl.spec import RLJob, parse_job
from streamrl.step_lines import STEP_LINE
from streamrl_workers.scheduler.effects import Effect
from streamrl_workers.scheduler.model import GROUP_LIFE, GroupState
from streamrl_workers.scheduler.server.connections import Connections, GeneratorEntry, PeerLink
from streamrl_workers.scheduler.server.guests import status_parts
from streamrl_workers.scheduler.server.rates import BeatWindow
from streamrl_workers.scheduler.server.status_endpoint import StatusEndpoint, _walls
from streamrl_workers.scheduler.settings import TaskSettings
from streamrl_workers.scheduler.views import DROP_REASONS
from streamrl_workers.tasks.values import FailureKind
from support.core_world import World, settings
from support.jobs import parsed_job, simulated_job
from support.metric_pages import mistakes, series, unset

Fails = Callable[[int, int], bool]
"""Whether the score of (group, sample) fails."""


@pytest.fixture
def observed(tmp_path: Path) -> Iterator[Callable[..., tuple[World, StatusEndpoint]]]:
    """Runs two steps of two groups of three samples; the numbers look at the core after each."""
    opened: list[StatusEndpoint] = []

    def run(
        fails: Fails, *, rewards: Sequence[float] = (0.0, 1.0, 2.0), **changes: int
    ) -> tuple[World, StatusEndpoint]:
        job = {"group_size": 3, "batch_groups": 2, "staleness": 0, "steps": 2, "evaluation_prompts": 0}
        world = World(settings(**{**job, **changes}), slots=(12,))
        world.reward = lambda _, sample_index: rewards[sample_index]
        status = StatusEndpoint(world.core, job=of_pool_p(), connections=Connections(), run_dir=tmp_path)
        status.parts = status_parts()
        opened.append(status)
        score, commit = world.score, world.commit

        def committed(count: int) -> None:
            commit(count)
            status.observe()

        world.score = lambda *, fail: score(fail=fails(world.scores[0].group_id, world.scores[0].sample_index))
        world.commit = committed
        world.run_out()
        return world, status

    yield run
    for status in opened:
        status.close()


def of_pool_p() -> RLJob:
    """A job with the pool of the world's generators."""
    document = simulated_job()
    document["spec"]["generators"][0]["name"] = "p"
    return parse_job(document)


def step_lines(tmp_path: Path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / "metrics/steps.jsonl").read_text().splitlines()]


def test_each_key_of_a_line_has_a_sentence(observed, tmp_path: Path) -> None:
    observed(lambda _, sample_index: sample_index == 1)
    assert [set(line) for line in step_lines(tmp_path)] == [set(STEP_LINE)] * 2


def test_loads_of_versions_are_summed_by_part_since_the_line_before() -> None:
    connections = Connections()
    assert connections.take_loads()["loads"] == 0
    took = {"fetch_s": 2.0, "waited_s": 0.5, "load_s": 4.0}
    connections.loaded(pb.WeightsLoaded(**took, load_parts={"copy": 1.0, "pause": 0.25, "load": 2.0, "cache": 0.75}))
    connections.loaded(pb.WeightsLoaded(**took))
    connections.loaded(pb.WeightsLoaded())  # it had the version already
    parts = {"pull": 4.0, "pause": 1.25, "copy": 1.0, "load": 6.0, "cache": 0.75}
    assert connections.take_loads() == {"loads": 2} | {f"{part}_seconds": seconds for part, seconds in parts.items()}
    assert connections.take_loads()["loads"] == 0


def test_all_reasons_of_a_drop_are_known() -> None:
    dropping = {
        event for events in GROUP_LIFE.values() for event, state in events.items() if state is GroupState.DROPPED
    }
    assert set(DROP_REASONS) == {event.value for event in dropping}


def test_a_step_has_the_mean_of_each_part_and_failures_by_kind(observed, tmp_path: Path) -> None:
    _, status = observed(lambda _, sample_index: sample_index == 1)
    lines = step_lines(tmp_path)
    assert len(lines) == 2
    for line in lines:
        assert line["reward_parts"] == {"whole": 1.0, "twice": 2.0}, "over the samples that have a reward"
        assert line["reward_failed"] == 2
        assert set(line["score_failures"]) == set(get_args(FailureKind))
        assert line["dropped"] == dict.fromkeys(DROP_REASONS, 0)
    failed = status.status()["score_failures"]
    assert sum(line["score_failures"]["timeout"] for line in lines) == failed["timeout"] == 4
    assert sum(failed.values()) == 4
    assert [line["score_errors"] for line in lines] == [{"timeout": "it hung"}, {}], "once"
    assert status.status()["score_errors"] == {"timeout": "it hung"}


def test_scores_of_dropped_groups_count_too(observed, tmp_path: Path) -> None:
    world, _ = observed(lambda group_id, sample_index: group_id == 0 and sample_index > 0)
    (first, second) = step_lines(tmp_path)
    assert (first["dropped"]["reward_failed"], second["dropped"]["reward_failed"]) == (1, 0)
    assert (first["score_failures"]["timeout"], second["score_failures"]["timeout"]) == (2, 0)
    assert first["reward_failed"] == 0, "the group is not in the step"
    assert world.core.view().score_failures == {"timeout": 2}


def test_held_out_failures_count(observed, tmp_path: Path) -> None:
    _, status = observed(lambda group_id, _: group_id >= 1 << 62, evaluation_prompts=2, evaluation_interval=1)
    assert status.status()["score_failures"]["timeout"] == 6, "two prompts, versions 0, 1 and 2"
    assert sum(line["reward_failed"] for line in step_lines(tmp_path)) == 0


def test_groups_with_equal_rewards_are_a_reason_of_their_own(observed, tmp_path: Path) -> None:
    observed(lambda _, __: False, rewards=(1.0, 1.0, 1.0), draws_per_step=3)
    drops = [line["dropped"] for line in step_lines(tmp_path)]
    assert drops == [dict.fromkeys(DROP_REASONS, 0) | {"zero_variance": 4}] * 2, "two draws more for each of two groups"


def test_numbers_have_what_a_status_shows(observed) -> None:
    _, status = observed(lambda _, __: False, evaluation_prompts=2, evaluation_interval=1)
    page = status.status()
    assert (page["checkpoint"], page["checkpoint_step"]) == ({"step": 2, "path": "step-2"}, 2)
    assert page["reward"] == page["last_evaluation"]["mean_reward"]
    assert page["bubbles"] == {name: {"wall_s": 0, "parts": {}} for name in ("generators", "trainer")}


def test_bubbles_are_summed_by_role() -> None:
    beats = [pb.Heartbeat(wall_seconds=4, bubble_seconds={"busy": 3, "skew": 1}), pb.Heartbeat(wall_seconds=2)]
    assert _walls(beats) == {"wall_s": 6, "parts": {"busy": 3, "skew": 1}}


def test_prometheus_has_a_counter_for_each_kind_and_reason(observed) -> None:
    _, status = observed(lambda group_id, sample_index: group_id == 0 and sample_index > 0)
    for _ in range(2):  # looking twice counts once
        page = status.metrics()
    for kind in get_args(FailureKind):
        count = 2.0 if kind == "timeout" else 0.0
        assert series(page, "streamrl_score_failures_total", kind=kind) == count
    for reason in DROP_REASONS:
        count = 1.0 if reason == "reward_failed" else 0.0
        assert series(page, "streamrl_dropped_groups_total", reason=reason) == count


def test_the_page_is_what_the_table_says_and_all_of_it_is_set(observed, tmp_path: Path) -> None:
    _, status = observed(lambda _, __: False, evaluation_prompts=2, evaluation_interval=1)
    assert list(mistakes(status.metrics(), SCHEDULER)) == []
    assert unset(status.metrics()) == {f"streamrl_{name}" for name in UNMEASURED}
    assert series(status.metrics(), "streamrl_trained_samples_total") == 12
    tokens = sum(line["tokens"] for line in step_lines(tmp_path))
    assert series(status.metrics(), "streamrl_sample_tokens_sum") == tokens > 0
    assert series(status.metrics(), "streamrl_group_staleness_steps_count") == 4
    assert series(status.metrics(), "streamrl_generators", pool="p") == 2


def test_a_mixture_has_its_numbers_by_task(tmp_path: Path) -> None:
    task = {"dataset": {"jsonl": {"path": "prompts.jsonl"}}, "rewards": [{"name": "whole", "exactMatch": {}}]}
    document = simulated_job()
    document["spec"]["task"] = {"mixture": [{"name": name, **task} for name in "ab"], "sampling": {"maxTokens": 8}}
    sampling = pb.Sampling(temperature=1.0, top_p=1.0, max_tokens=8)
    job = {"tasks": tuple(TaskSettings(name=name, sampling=sampling) for name in "ab"), "shares": Mixture([1, 1])}
    world = World(settings(group_size=2, batch_groups=2, staleness=0, steps=2, draws_per_step=2, **job), slots=(12,))
    world.reward = lambda group_id, sample_index: 0.5 if group_id == 0 else float(group_id % 2 == sample_index)
    status = StatusEndpoint(world.core, job=parse_job(document), connections=Connections(), run_dir=tmp_path)
    commit = world.commit
    world.commit = lambda count: (commit(count), status.observe())
    world.run_out()
    lines = step_lines(tmp_path)
    assert [sum(task["groups"] for task in line["tasks"].values()) for line in lines] == [2, 2]
    assert [line["tasks"]["a"]["dropped"] for line in lines] == [1, 0], "group 0, whose rewards are equal"
    assert lines[-1]["reward_parts"] == {f"{name}/{part}": mean for name in "ab" for part, mean in PARTS.items()}
    assert status.status()["last_evaluation"]["tasks"]["b"]["prompts"] == 1
    page = status.metrics()
    assert list(mistakes(page, SCHEDULER)) == []
    trained = {name: sum(line["tasks"][name]["groups"] for line in lines) for name in "ab"}
    for name in "ab":
        assert series(page, "streamrl_task_trained_groups_total", task=name) == trained[name]
        assert series(page, "streamrl_task_dropped_groups_total", task=name) == (name == "a")
        assert series(page, "streamrl_task_reward_mean", task=name) == 0.5
        assert series(page, "streamrl_task_evaluation_reward_mean", task=name) in (0.0, 0.5, 1.0)
    status.close()


PARTS = {"whole": 0.5, "twice": 1.0}


async def test_a_generator_without_weights_is_behind_by_nothing_known(tmp_path: Path) -> None:
    world = World(settings(group_size=2, batch_groups=2, steps=3, evaluation_prompts=0))
    world.run_out()
    connections = Connections()
    status = StatusEndpoint(world.core, job=of_pool_p(), connections=connections, run_dir=tmp_path)

    def lag_with(name: str, *, version_step: int | None) -> float:
        hello = pb.GeneratorHello(generator_id=name, instance="i", pool="p", slots=1)
        link, beats = PeerLink(name), BeatWindow(10.0)
        connections.add(GeneratorEntry(link=link, hello=hello, version_step=version_step, beats=beats))
        return series(status.metrics(), "streamrl_weights_lag_steps", pool="p")

    assert math.isnan(series(status.metrics(), "streamrl_weights_lag_steps", pool="p")), "no generator"
    assert math.isnan(lag_with("new", version_step=None))
    assert world.core.view().announced_step == 3
    assert lag_with("old", version_step=1) == 2
    assert lag_with("older", version_step=0) == 3
    status.close()


@pytest.mark.parametrize("steps", [1, 40, 20_000])
def test_the_curves_of_a_run_are_some_hundred_points_however_long_it_is(tmp_path: Path, steps: int) -> None:
    world = World(settings(group_size=2, batch_groups=2, steps=2, evaluation_prompts=0))
    status = StatusEndpoint(world.core, job=parsed_job(), connections=Connections(), run_dir=tmp_path)
    assert status.curves() == {"steps": [], "evaluations": []}
    taken_again = [*range(steps // 2, steps)]
    lines = [{"step": step, "reward_mean": 0.0, "staleness": {"0": 64}} for step in range(steps - steps // 4)]
    lines += [
        {"step": step, "reward_mean": 1.0, "tokens_per_s": 9.5, "bubbles": {"trainer": None}} for step in taken_again
    ]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (tmp_path / "metrics/steps.jsonl").write_text(text + '{"step": 99')
    (tmp_path / "metrics/evaluations.jsonl").write_text('{"step": 0, "mean_reward": 0.5, "prompts": 8}\n[]\n')
    found = status.curves()
    assert found["evaluations"] == [{"step": 0, "mean_reward": 0.5}]
    points = found["steps"]
    assert points[-1] == {"step": steps - 1, "reward_mean": 1.0, "tokens_per_s": 9.5, "bubbles": {"trainer": None}}
    numbers = [point["step"] for point in points]
    assert numbers == sorted(set(numbers)) and len(numbers) <= 200 and numbers[0] == 0
    assert len(numbers) == steps if steps < 200 else len(numbers) > 150
    widest = max(after - before for before, after in itertools.pairwise([0, *numbers]))
    assert widest <= max(1, steps // 50)
    old = [point for point in points if point["reward_mean"] != (point["step"] >= steps // 2)]
    assert len(old) <= (steps > 200), "of a large file one may stand between two lines that are read"
    status.close()


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, -1.0, 1e308])
def test_whatever_a_trainer_tells_the_page_is_made(tmp_path: Path, number: float) -> None:
    world = World(settings(group_size=2, batch_groups=2, steps=2, evaluation_prompts=0))
    status = StatusEndpoint(world.core, job=parsed_job(), connections=Connections(), run_dir=tmp_path)
    step_done = world.core.step_done

    def with_metrics(done: pb.StepDone) -> list[Effect]:
        names = (
            "step_seconds",
            "skipped_nonfinite_steps",
            "groups",
            "zero_variance_groups",
            "loss",
            "forward_tokens",
            "entropy",
            "mfu",
            "padding_share",
            "forward_seconds",
        )
        done.metrics.update(dict.fromkeys(names, number))
        return step_done(done)

    world.core.step_done = with_metrics
    world.run_out()
    status.observe()
    assert list(mistakes(status.metrics(), SCHEDULER)) == []
    status.close()
    again = StatusEndpoint(world.core, job=parsed_job(), connections=Connections(), run_dir=tmp_path)
    assert list(mistakes(again.metrics(), SCHEDULER)) == []
    again.close()


UNMEASURED = {
    *("loss", "value_loss", "entropy_nats", "behaviour_kl_nats", "reference_kl_nats", "clip_ratio", "masked_ratio"),
    *(
        "gradient_norm",
        "learning_rate",
        "reward_std",
        "zero_variance_groups_ratio",
        "pool_clip_ratio",
        "pool_sequence_clip_ratio",
    ),
    *(f"train_infer_logprob_diff_{name}" for name in ("mean_nats", "max_nats", "kl_nats", "tokens")),
    *("length_recall_ratio", "length_recall_lower_ratio", "length_rank_correlation"),
    *("evaluation_sampled_reward_mean", "cost_per_reward_point", "weights_lag_steps"),
    "left_out_versions_total",
    *("mfu_ratio", "trainer_tokens_per_second", "padding_ratio", "pass_seconds"),
    *("task_reward_mean", "task_length_mean_tokens", "task_evaluation_reward_mean"),
    *("task_trained_groups_total", "task_dropped_groups_total"),
}
"""The world trains one task; its trainer tells no numbers, its generators have no connection and are in no other cluster, its few prompts say nothing of lengths, its rewards do not rise."""


def test_a_lasting_log_prob_difference_is_on_every_page_and_outlives_the_scheduler(tmp_path: Path, caplog) -> None:
    world = World(settings(group_size=2, batch_groups=2, steps=6, evaluation_prompts=0))
    metrics = {"train_infer_logprob_diff_mean/p/0": 0.3, "train_infer_logprob_diff_mean/p/1": 0.5}
    job = simulated_job()
    job["spec"]["trainer"]["trainInferLogprobDiff"] = {"maxMean": 0.2, "steps": 3}
    status = StatusEndpoint(world.core, job=parse_job(job), connections=Connections(), run_dir=tmp_path)
    commit, step_done = world.commit, world.core.step_done

    def committed(count: int) -> None:
        commit(count)
        status.observe()

    def with_metrics(done: pb.StepDone) -> list[Effect]:
        done.metrics.update(metrics)
        return step_done(done)

    world.commit, world.core.step_done = committed, with_metrics
    world.run_out()
    above = [line["above_bound"]["train_infer_logprob_diff_mean"] for line in step_lines(tmp_path)]
    assert above == [1, 2, 3, 4, 5, 6]
    assert len([record for record in caplog.records if "log-prob difference" in record.message]) == 1
    status.close()
    again = StatusEndpoint(world.core, job=parse_job(job), connections=Connections(), run_dir=tmp_path)
    for one in (status, again):
        (warning,) = one.status()["warnings"]
        assert warning["type"] == "TrainInferLogprobDiffHigh"
        page = one.metrics()
        assert series(page, "streamrl_train_infer_logprob_diff_mean_nats", pool="p", lag="1") == 0.5
        assert series(page, "streamrl_warning", type="TrainInferLogprobDiffHigh") == 1
        assert series(page, "streamrl_warning", type="SequencesClipped") == 0
    again.close()


def test_answers_that_all_end_at_a_limit_are_said_with_the_first_step(
    tmp_path: Path, caplog, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(settings(group_size=2, batch_groups=2, steps=3, evaluation_prompts=0))
    status = StatusEndpoint(world.core, job=parse_job(simulated_job()), connections=Connections(), run_dir=tmp_path)
    commit, make_token = world.commit, world.make_token

    def committed(count: int) -> None:
        commit(count)
        status.observe()

    monkeypatch.setattr(world, "commit", committed)
    monkeypatch.setattr(world, "make_token", lambda generator, lease, *, finish: make_token(generator, lease, finish=finish and "length"))  # fmt: skip
    world.run_out()
    assert [line["truncated"] for line in step_lines(tmp_path)] == [4, 4, 4]
    assert [record.message.partition(":")[0] for record in caplog.records if "answers end at" in record.message] == ["step 0"]  # fmt: skip
    assert [one["type"] for one in status.status()["warnings"]] == ["AnswersTruncated"]
    assert series(status.metrics(), "streamrl_warning", type="AnswersTruncated") == 1
    status.close()
