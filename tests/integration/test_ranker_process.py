"""The ranker's process by its real socket, and in a run: it learns, keeps to its budget, and the run goes on without it."""

import asyncio
import contextlib
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from streamrl import keys
from streamrl.errors import UserError
from streamrl.spec.scheduling import RankerSpec
from streamrl_workers.ranker.folder import HEAD_FILE, MODULE
from streamrl_workers.ranker.language_model import LanguageModel
from streamrl_workers.scheduler.effects import AskRanker
from streamrl_workers.scheduler.lengths import prompt_key
from streamrl_workers.scheduler.lengths.trust import measure
from streamrl_workers.scheduler.server.ranker_client import Patience, RankerClient
from support.jobs import simulated_job, write_prompts
from support.runs import wait_for
from support.tiny_folder import tiny_folder
from support.tiny_trainer import VOCABULARY
from support.worker_processes import Workers

DEADLINE_S = 400.0
"""The process runs at the lowest priority, by design: on a machine whose cores are taken its start takes minutes."""
pytestmark = pytest.mark.timeout(900)
REFIT_PAIRS = 100
ROUNDS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ranker that has learnt nothing, as `ranker fit` writes one."""
    model = tiny_folder(tmp_path_factory.mktemp("model"))
    words = Tokenizer(WordLevel({f"w{n}": n for n in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1").save_pretrained(model)
    made = tmp_path_factory.mktemp("ranker")
    LanguageModel.of(str(model), learning_rate=3e-3, field="model").save(made)
    return made


def word_pairs(count: int, *, seed: int) -> list[tuple[str, float]]:
    """The tokens follow from how often w5 is in the prompt."""
    draw = Random(seed)
    prompts = [" ".join(f"w{draw.choice((3, 5))}" for _ in range(12)) for _ in range(count)]
    return [(prompt, 2.0 ** prompt.count("5")) for prompt in prompts]


class Asked:
    """A client with its process, and what it has answered."""

    def __init__(self, folder: Path, run_dir: Path, *, start_s: float = DEADLINE_S, cpu_percent: int = 20) -> None:
        self.scores: dict[int, float] = {}
        patience = Patience(start_s=start_s, first_pause_s=0.001)
        given = {"path": str(folder), "cpuPercent": cpu_percent, "refitPairs": REFIT_PAIRS}
        choice = RankerSpec.model_validate({"languageModel": given})
        self.client = RankerClient(
            choice, base_dir=run_dir, run_dir=run_dir, on_scores=self.scores.update, patience=patience
        )

    @contextlib.asynccontextmanager
    async def running(self) -> Any:
        task = asyncio.create_task(self.client.run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def learn(self, pairs: list[tuple[str, float]]) -> None:
        self.client.ask(AskRanker(prompts=(), pairs=tuple(pairs)))

    def rounds(self) -> int:
        """As of its newest answer; each look asks for another."""
        if not self.client.status().waiting:
            self.client.ask(AskRanker(prompts=((prompt_key("w3"), "w3"),), pairs=()))
        return self.client.status().rounds

    async def until(self, holds: Any, what: str) -> None:
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not holds():  # noqa: ASYNC110 - a poll with a deadline: another process is awaited
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"waited for {what}: {self.client.status()}") from None

    async def held_out(self) -> float:
        """Rank correlation on prompts never learnt."""
        pairs = word_pairs(80, seed=9)
        by_key = {prompt_key(prompt): (prompt, tokens) for prompt, tokens in pairs}
        self.scores.clear()
        self.client.ask(AskRanker(prompts=tuple((key, prompt) for key, (prompt, _) in by_key.items()), pairs=()))
        await self.until(lambda: self.scores.keys() >= by_key.keys(), "scores")
        found = measure([self.scores[key] for key in by_key], [t for _, t in by_key.values()])
        return found.rank_correlation or 0.0


@pytest.mark.soak
async def test_it_learns_within_its_budget_and_a_later_process_goes_on(folder: Path, tmp_path: Path) -> None:
    async with Asked(folder, tmp_path).running() as asked:
        before = await asked.held_out()
        began_s, began_cpu_s = time.monotonic(), asked.client.status().cpu_s
        for number in range(ROUNDS):
            asked.learn(word_pairs(REFIT_PAIRS, seed=number))
            await asked.until(lambda: asked.rounds() > number, "a round")  # noqa: B023 - awaited here
        numbers = asked.client.status()
        wall_s, cpu_s = time.monotonic() - began_s, numbers.cpu_s - began_cpu_s
        assert cpu_s < 0.2 * wall_s + 0.5, (cpu_s, wall_s)
        after = await asked.held_out()
    assert abs(before) < 0.3
    assert after > 0.8
    assert numbers.pairs == ROUNDS * REFIT_PAIRS
    async with Asked(folder, tmp_path, cpu_percent=0).running() as asked:
        assert await asked.held_out() == pytest.approx(after, abs=0.02)
    assert [path.name for path in (tmp_path / "ranker").glob("model-*")] == [f"model-{ROUNDS}"]


async def test_weights_that_do_not_fit_are_one_line(folder: Path, tmp_path: Path) -> None:
    spoilt = tmp_path / "spoilt"
    shutil.copytree(folder, spoilt)
    head = LanguageModel.load(folder, field="x")._head.state_dict()
    save_file({name: tensor[..., :1].contiguous() for name, tensor in head.items()}, spoilt / HEAD_FILE)
    with pytest.raises(UserError, match=r"path: cannot be read: ") as caught:
        async with asyncio.timeout(DEADLINE_S):
            await Asked(spoilt, tmp_path).client.run()
    assert "\n" not in str(caught.value)


async def test_one_that_never_comes_up_is_started_again_and_what_is_asked_waits(folder: Path, tmp_path: Path) -> None:
    asked = Asked(folder, tmp_path, start_s=0.01)
    async with asked.running():
        asked.client.ask(AskRanker(prompts=((1, "w3"),), pairs=(("w5", 2.0),)))
        await asked.until(lambda: asked.client.status().deaths > 2, "three deaths")
        assert asked.client.status().waiting == 1


# ---- in a run


def job_with(path: str) -> dict[str, Any]:
    latency = [{"batch": 1, "milliseconds": 10.0}]  # leaves the cores to the ranker, which has the lowest priority
    job = simulated_job(steps=100_000, replicas=1, latency=latency)
    ranker = {"languageModel": {"path": path, "refitPairs": 16}}
    job["spec"]["scheduling"] = {"leaseSeconds": 2.0, "lengthSignals": ["Ranker"], "ranker": ranker}
    return job


@pytest.fixture
def workers(tmp_path: Path, folder: Path) -> Iterator[Workers]:
    write_prompts(tmp_path / "prompts.jsonl")
    started = Workers.prepare(job_with(str(folder)), folder=tmp_path / "run")
    yield started
    started.close()


def ranker_page(workers: Workers) -> Mapping[str, Any]:
    found: Mapping[str, Any] = workers.numbers()["lengths"]["ranker"]
    return found


def rankers_of(scheduler: int) -> list[psutil.Process]:
    """The ranker's process, if it lives."""
    return [child for child in psutil.Process(scheduler).children() if MODULE in child.cmdline()]


def test_a_run_goes_on_when_its_ranker_is_killed_and_takes_it_along_at_its_end(workers: Workers) -> None:
    scheduler = workers.start_scheduler()
    workers.start("trainer-0")
    workers.start("generator-sim-0")
    wait_for(lambda: workers.page("healthz").strip() == "ok", what="the scheduler to be ready", deadline_s=DEADLINE_S)
    wait_for(lambda: ranker_page(workers)["rounds"] > 0, what="a round of tuning", deadline_s=DEADLINE_S)
    (first,) = rankers_of(scheduler.pid)
    assert first.nice() == 19
    first.kill()
    wait_for(lambda: ranker_page(workers)["deaths"] == 1, what="the death to be seen", deadline_s=DEADLINE_S)
    step = workers.numbers()["step"]
    wait_for(lambda: workers.numbers()["step"] > step + 5, what="the run to go on", deadline_s=DEADLINE_S)
    assert "ended by signal 9; started again" in workers.text("scheduler")
    wait_for(
        lambda: workers.numbers()["lengths"]["predictions"]["Ranker"], what="its predictions", deadline_s=DEADLINE_S
    )
    (second,) = wait_for(lambda: rankers_of(scheduler.pid), what="another ranker", deadline_s=DEADLINE_S)
    scheduler.kill()
    wait_for(lambda: not second.is_running(), what="the ranker to end with the scheduler", deadline_s=DEADLINE_S)


def test_a_bad_folder_ends_before_the_run_begins(tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.jsonl")
    workers = Workers.prepare(job_with("nowhere"), folder=tmp_path / "run")
    try:
        child = workers.start("scheduler")
        assert child.wait(DEADLINE_S) == 2
        (line,) = workers.text("scheduler").strip().splitlines()
        assert line.startswith(
            "spec.scheduling.ranker.languageModel.path: must be a folder that `streamrl ranker fit` wrote, got "
        )
        assert not (workers.folder / keys.FILE_NUMBERS).exists()
    finally:
        workers.close()
