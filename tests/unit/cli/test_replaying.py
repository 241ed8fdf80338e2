"""Steps of a run trained again from its samples, and the first step in which two runs part."""

import argparse
import asyncio
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl.errors import UserError
from streamrl.keys import FILE_ADOPTED
from streamrl.proto import stream_pb2 as pb
from streamrl.spec.training import SimulatedTrainer
from streamrl_cli.replaying import diff, replay
from streamrl_cli.replaying.history import read_history
from streamrl_cli.replaying.retrain import retrain
from streamrl_cli.runner.folder import FILE_RUN
from streamrl_workers.stream.digests import seal
from streamrl_workers.stream.packing import pack_float32, unpack_float32
from streamrl_workers.trainer.engines.simulated import SimulatedTrainEngine
from streamrl_workers.trainer.engines.torch_engine import TorchEngine
from streamrl_workers.weights.hashing import TensorBytes
from support.hostile import write_json
from support.jobs import simulated_job
from support.tiny_trainer import engine_on, narrow_worker, tiny_engine
from support.trainer_groups import trainer_spec
from support.written_histories import BATCH, STEPS, Change, write_history


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "trajectoryBalance": {"algorithm": {"beta": 0.5, "replay": {"sharePercent": 50}}},
    "ppo": {"correction": {"m2po": {}}},
    "archer": {"algorithm": {"epochs": 1, "resample": {}}},
}


def engine(rule: str = "grpo") -> TorchEngine:
    return tiny_engine(trainer_spec(microBatchTokens=64, rule=rule, **ALGORITHMS[rule]))


@pytest.mark.parametrize("rule", ALGORITHMS)
@pytest.mark.parametrize("seed", range(4))
async def test_versions_come_out_again_bit_for_bit(seed: int, rule: str, tmp_path: Path) -> None:
    hashes = await write_history(tmp_path / "run", engine(rule), seed=seed)
    history = read_history(tmp_path / "run")
    assert [history.hash_of(version) for version in range(STEPS + 1)] == hashes
    assert any(step.micro_steps for step in history.steps)
    assert list(retrain(engine(rule), history.steps)) == hashes
    whole = [replace(step, micro_steps=()) for step in history.steps]
    assert list(retrain(engine(rule), whole)) != hashes, "another cut of the same samples rounds otherwise"


async def test_versions_of_steps_whose_memory_ran_out_come_out_again_bit_for_bit(tmp_path: Path) -> None:
    job = trainer_spec(microBatchTokens=64)
    hashes = await write_history(tmp_path / "run", engine_on(narrow_worker(job, rows=2), spec=job))
    history = read_history(tmp_path / "run")
    assert history.steps[0].cuts.halved
    assert history.steps[-1].cuts.room_tokens
    assert list(retrain(engine(), history.steps)) == hashes


async def test_some_steps_are_replayed_alone(tmp_path: Path) -> None:
    hashes = await write_history(tmp_path / "run", engine())
    history = read_history(tmp_path / "run", end=2)
    assert list(retrain(engine(), history.steps)) == hashes[:3]
    assert history.hash_of(2) == hashes[2], "the next step, which is not asked for, began with it"


@pytest.mark.parametrize(
    ("share_percent", "rule"),
    [(0, "has no archive"), (50, f"has the samples of 2 of the {BATCH} groups of step 0")],
)
async def test_a_run_without_all_of_its_samples_is_refused(share_percent: int, rule: str, tmp_path: Path) -> None:
    await write_history(tmp_path / "run", engine(), share_percent=share_percent)
    with pytest.raises(UserError, match=rule):
        read_history(tmp_path / "run")


async def test_a_run_that_began_from_anothers_checkpoint_is_refused_by_its_name(tmp_path: Path) -> None:
    await write_history(tmp_path / "run", engine())
    adopted = {"run": "first", "step": 7, "chain": "00", "path": "checkpoints/step-7"}
    (tmp_path / "run" / FILE_ADOPTED).write_text(seal(adopted))
    with pytest.raises(UserError, match="began with step 7 of run first, so it has no samples of the steps before"):
        read_history(tmp_path / "run")


def test_no_step_is_nothing_to_replay(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--to-step: must be at least 1, got 0"):
        replay.run(argparse.Namespace(run=tmp_path, to_step=0))


@pytest.mark.parametrize(
    ("patience_s", "code", "said"),
    [(3600.0, 1, "version 0 differs: "), (0.0, 2, "streamrl: the trainer made no version within 0 s; see ")],
)
def test_a_hash_that_differs_and_a_trainer_that_fails_have_codes_of_their_own(
    patience_s: float,
    code: int,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replay, "_VERSION_S", patience_s)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    asyncio.run(write_history(tmp_path / "run", engine()))  # of another model than the job's
    write_json(tmp_path / "run" / FILE_RUN, {"base_dir": str(tmp_path)})
    assert replay.run(argparse.Namespace(run=tmp_path / "run", to_step=None)) == code
    told = capsys.readouterr()
    assert (told.out + told.err).startswith(f"code: {tmp_path}\n{said}")


class OtherWeights(SimulatedTrainEngine):
    """The job's own engine, whose weights are another job's from a version on."""

    def __init__(self, *, wrong_version: int) -> None:
        super().__init__(spec=SimulatedTrainer(secondsPerStep=0.0), seed=0)
        self._wrong = wrong_version

    def tensors(self) -> dict[str, TensorBytes]:
        self._seed = int(self._version >= self._wrong)
        return super().tensors()


@pytest.mark.parametrize(("wrong_step", "to_step"), [(1, 1), (2, 2), (STEPS, STEPS), (STEPS, STEPS - 1)])
def test_the_last_step_that_is_asked_for_is_compared(
    wrong_step: int, to_step: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(write_history(tmp_path / "run", OtherWeights(wrong_version=wrong_step)))
    write_json(tmp_path / "run" / FILE_RUN, {"base_dir": str(tmp_path)})
    code = replay.run(argparse.Namespace(run=tmp_path / "run", to_step=to_step))
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"code: {tmp_path}"
    assert [line.split()[-1] for line in said[1:-1]] == ["same"] * (len(said) - 2)
    if wrong_step <= to_step:
        assert (code, len(said)) == (1, wrong_step + 2)
        assert said[-1].startswith(f"version {wrong_step} differs: ")
    else:
        assert (code, said[-1]) == (0, f"compared steps 1 to {to_step}: all are the same")


@pytest.mark.parametrize(("to_step", "fix"), [(STEPS, f"name at most {STEPS - 1}"), (None, "")])
def test_a_step_whose_version_is_not_recorded_is_no_success(
    to_step: int | None, fix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of a run that goes on: the version of its newest step is recorded with the next one."""
    asyncio.run(write_history(tmp_path / "run", OtherWeights(wrong_version=STEPS + 1), ends=False))
    write_json(tmp_path / "run" / FILE_RUN, {"base_dir": str(tmp_path)})
    asked = argparse.Namespace(run=tmp_path / "run", to_step=to_step)
    if fix:
        with pytest.raises(UserError, match=fix):
            replay.run(asked)
    else:
        assert replay.run(asked) == 0
        assert capsys.readouterr().out.splitlines()[-1] == f"compared steps 1 to {STEPS - 1}: all are the same"


def _of(group_id: int, index: int, change: Change) -> Change:
    return lambda sample: change(sample) if (sample.group_id, sample.sample_index) == (group_id, index) else None


def _other_token(sample: pb.Sample) -> None:
    sample.tokens = bytes([sample.tokens[0] ^ 1]) + sample.tokens[1:]


def _other_logprob(sample: pb.Sample) -> None:
    first, *rest = unpack_float32(sample.logprobs)
    sample.logprobs = pack_float32([first - 1.0, *rest])


def _other_version(sample: pb.Sample) -> None:
    sample.spans[0].step -= 1


def _other_reward(sample: pb.Sample) -> None:
    sample.reward += 0.25


def _no_reward(sample: pb.Sample) -> None:
    sample.ClearField("reward")


CHANGES: dict[str, tuple[Change, str]] = {
    "token": (_other_token, "token 0 is "),
    "log-prob": (_other_logprob, "log-prob 0 is "),
    "version": (_other_version, "version is 1 | 0"),
    "reward": (_other_reward, "reward is 1.0 | 1.25"),
    "no reward": (_no_reward, "reward is 1.0 | none"),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_diff_finds_the_step_and_the_sample_that_was_changed(
    change: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_sample, said = CHANGES[change]
    await write_history(tmp_path / "one", engine())
    await write_history(tmp_path / "other", engine(), change=_of(BATCH + 2, 1, change_sample))
    code, lines = _diff(tmp_path / "one", tmp_path / "other", capsys)
    assert code == 1
    assert lines[0].startswith(f"step 1: group {BATCH + 2} sample 1: {said}"), lines
    if change in ("token", "reward"):  # what follows from it
        assert lines[1].startswith("step 1: version 2 is "), lines


async def test_diff_of_equal_runs_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "other"):
        await write_history(tmp_path / name, engine())
    assert _diff(tmp_path / "one", tmp_path / "other", capsys) == (0, [f"the same in all {STEPS} steps of both"])


async def test_diff_tells_order_micro_steps_and_what_follows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (0, 2):
        await write_history(tmp_path / str(seed), engine(), seed=seed)
    code, lines = _diff(tmp_path / "0", tmp_path / "2", capsys)
    assert code == 1
    assert _kinds(lines) == ["groups came in the order", "micro-steps behind groups", "version 1 is"]
    assert not lines[-1].endswith("has computed them")


async def test_diff_tells_fields_of_the_job_and_other_arithmetic(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await write_history(tmp_path / "one", engine())
    await write_history(tmp_path / "other", tiny_engine(trainer_spec(microBatchTokens=64, learningRate=0.01)))
    job = simulated_job(steps=STEPS, batch_groups=BATCH)
    job["spec"]["trainer"]["learningRate"] = 0.01
    write_json(tmp_path / "other" / "job.json", job)
    code, lines = _diff(tmp_path / "one", tmp_path / "other", capsys)
    assert code == 1
    assert "job: spec.trainer.learningRate: '1e-06' | '0.01'" in lines
    assert lines[-1].startswith("step 0: version 1 is ")
    assert lines[-1].endswith("from the same samples, so another machine, release or setting has computed them")


def _kinds(lines: Iterable[str]) -> list[str]:
    """Without the step, and up to the first number that is listed."""
    texts = [line.removeprefix("step 0: ") for line in lines]
    return [
        next(
            kind
            for kind in ("groups came in the order", "micro-steps behind groups", "version 1 is")
            if text.startswith(kind)
        )
        for text in texts
    ]


def _diff(one: Path, other: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    code = diff.run(argparse.Namespace(one=one, other=other))
    return code, capsys.readouterr().out.splitlines()
