"""A pool that says the frozen model's log-probs, in real runs: the trainer's numbers, deaths in mid-stream, all of them exact."""

import json
import os
import random
import signal
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from streamrl_workers.metrics.jsonl import read_jsonl
from support.jobs import tiny_job, write_prompts
from support.runs import LocalRun, wait_for
from support.tiny_folder import tiny_folder

SLOTS, BATCH_GROUPS, GROUP_SIZE, STALENESS, MAX_TOKENS = 4, 8, 4, 1, 24
SAMPLE_BYTES = 96 + 4 * 64 + 3 * 4 * MAX_TOKENS
"""Its overhead, its prompt, and a token, its log-prob and the frozen model's each time."""


def job(*, steps: int, replicas: int = 1, batch_groups: int = 4, **spec: Any) -> dict[str, Any]:
    """A tiny model, a pull to what it began as, and a pool that says how far it is from there."""
    made = tiny_job(steps=steps)
    made["spec"] |= {"algorithm": {"grpo": {"referenceKl": {"coefficient": 0.01}}}, **spec}
    made["spec"]["trainer"] = {"learningRate": 1e-2, "reference": {"pool": "frozen"}}
    made["spec"]["generators"].append(
        {"name": "frozen", "engine": {"hf": {"slots": SLOTS}}, "scaling": {"static": {"replicas": replicas}}}
    )
    made["spec"]["pipeline"]["batchGroups"] = batch_groups
    made["spec"]["storage"] = {"checkpoints": {"intervalSteps": 5}}
    made["spec"]["failurePolicy"] = {"maxRestarts": 100}
    return made


def start(tmp_path: Path, made: dict[str, Any]) -> LocalRun:
    write_prompts(tmp_path / "prompts.jsonl")
    return LocalRun.start(made, folder=tmp_path / "run", base_dir=tmp_path)


def trainer_numbers(run: LocalRun) -> list[dict[str, float]]:
    """Of every step, of a run that ended well."""
    assert run.process.wait(500) == 0, run.logs()
    run.assert_exact()
    return [line["trainer"] for line in read_jsonl(run.folder / "metrics/steps.jsonl")]


@pytest.mark.timeout(600)
def test_the_divergence_is_zero_before_the_first_update_and_grows(tmp_path: Path) -> None:
    run = start(tmp_path, job(steps=4))
    first, *_, last = trainer_numbers(run)
    assert first["reference_kl"] == pytest.approx(0.0, abs=1e-6)
    assert last["reference_kl"] > 1e-4
    assert first["forward_tokens"] == first["tokens"] > 0
    assert list(read_jsonl(run.folder / "metrics/generator-frozen-0.jsonl")), "the pool says where its time went"


@pytest.mark.timeout(600)
def test_a_teacher_is_followed(tmp_path: Path) -> None:
    model, teacher = tiny_folder(tmp_path / "model"), tiny_folder(tmp_path / "teacher", seed=1)
    directories: Any = {"path": {"directory": str(model)}}, {"path": {"directory": str(teacher)}}
    run = start(tmp_path, job(steps=12, model=directories[0], algorithm={"distillation": {"teacher": directories[1]}}))
    first, *_, last = trainer_numbers(run)
    assert 0 < last["reference_kl"] < 0.8 * first["reference_kl"]


class Kills:
    """Of generators of the pool that hold all the samples they can."""

    def __init__(self, run: LocalRun) -> None:
        self._run = run
        self._random = random.Random(0)
        self.most_bytes = 0
        """Of samples, while nobody of the pool answered."""

    def kill_one(self) -> None:
        """Stop all that serve, until they are full or given up; then one dies, and the others go on."""
        self.wait(self._serving, "one to serve")
        names = self._serving()
        with self._stopped(names):
            self.wait(lambda: self._is_full(len(names)), "those to hold samples")
            self.most_bytes = max(self.most_bytes, self._numbers()["buffered_bytes"])
            assert self._run.kill(self._random.choice(names))

    def wait(self, happened: Callable[[], object], what: str) -> None:
        """The run must not end before."""
        wait_for(
            lambda: happened() or self._run.process.poll() is not None,
            what=f"{what}; {self._run.logs()}",
            deadline_s=300,
        )
        assert self._run.process.poll() is None, self._run.logs()

    @contextmanager
    def _stopped(self, names: list[str]) -> Iterator[None]:
        pids = [self._run.freeze(name) for name in names]
        try:
            yield
        finally:
            for pid in pids:
                with suppress(ProcessLookupError):  # the one that was killed
                    os.kill(pid, signal.SIGCONT)

    def _serving(self) -> list[str]:
        listed = [one["id"] for one in self._numbers()["generators"] if one["pool"] == "frozen"]
        return [name for name in listed if self._run.pid_of(name)]

    def _is_full(self, stopped: int) -> bool:
        pool = self._numbers()["scaling"]["pools"].get("frozen", {"silent": stopped})
        return pool["silent"] > 0 or pool["active"] >= stopped * SLOTS

    def _numbers(self) -> dict[str, Any]:
        port = json.loads((self._run.folder / "endpoints/scheduler.json").read_text())["signals"]
        with urllib.request.urlopen(f"http://{port}/numbers", timeout=60) as page:
            return dict(json.loads(page.read()))


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_twenty_kills_in_mid_stream_lose_nothing(tmp_path: Path) -> None:
    steps = 60
    run = start(tmp_path, job(steps=steps, replicas=2, batch_groups=BATCH_GROUPS))
    kills = Kills(run)
    for kill in range(20):
        kills.wait(lambda least=2 * kill + 1: run.steps() >= least, "steps")
        kills.kill_one()
    numbers = trainer_numbers(run)
    assert len(numbers) == steps
    assert numbers[0]["reference_kl"] == pytest.approx(0.0, abs=1e-6)
    assert run.result()["check"]["consumed"] == steps * BATCH_GROUPS
    reissued = sum(line["reissued"] for line in read_jsonl(run.folder / "metrics/steps.jsonl"))
    assert reissued >= 20, "they held samples"
    assert 0 < kills.most_bytes <= (1 + STALENESS) * BATCH_GROUPS * GROUP_SIZE * SAMPLE_BYTES
