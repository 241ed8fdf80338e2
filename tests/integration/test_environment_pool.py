"""Environments in the task pool's real processes: whatever one does, every turn gets exactly one answer."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamrl.keys import ENV_MODEL_PATH
from streamrl_workers.tasks.values import PlayTurn, ScoreSample, TurnAnswer
from support.chat_models import chat_tokenizer, save_tokenizer
from support.runs import DEADLINE_S
from support.task_pools import AskedPool, running_pool

TIMEOUT_S = 60.0
"""What must be answered is answered, however busy the machine is."""
HANG_S = 5.0
"""Where something hangs: the others are answered within it."""

ENVIRONMENTS = r'''
import os, random, sys, time

MEGABYTES = {"fat": 48, "too fat": 600}

class Env:
    """Tells its process, what it has heard, and a number of its seed; does what the completion says."""

    def __init__(self, question, seed):
        self.question, self.random, self.heard = question, random.Random(seed), []

    def step(self, completion):
        self.heard.append(completion)
        if completion == "hang":
            while True:
                pass
        if completion.startswith("wait for "):
            while not os.path.exists(completion.removeprefix("wait for ")):
                time.sleep(0.01)
        if completion == "sleep":
            time.sleep(1000)
        if completion == "raise":
            raise RuntimeError("two\nlines \udc80")
        if completion == "exit":
            sys.exit(3)
        if completion == "die":
            os._exit(7)
        if completion == "nonsense":
            return 42
        if completion == "infinite":
            return "o", float("inf"), False
        if completion == "long":
            return "x" * 100_000, 0, False
        if completion == "odd":
            return "\udc80", 0, False
        if completion in MEGABYTES:
            self.held = bytearray(MEGABYTES[completion] << 20)
        if completion == "pid":
            return str(os.getpid()), 0, False
        return f"{self.question} {'/'.join(self.heard)} {self.random.randrange(1000)}", 0.25, completion == "end"

def make(*, question, answer, metadata, seed):
    return Env(question, seed)
'''

GAME = {"name": "game", "weightPercent": 50, "environment": {}}
RIGHT = {"name": "right", "weightPercent": 50, "verifier": {}}


@asynccontextmanager
async def running(base_dir: Path, *, timeout_s: float = TIMEOUT_S, **task: Any) -> AsyncIterator[AskedPool]:
    environment = {"python": {"function": "pool_envs:make"}, "timeoutSeconds": timeout_s, "maxObservationChars": 50}
    task |= {"rewards": (GAME, RIGHT), "environment": environment}
    async with running_pool(base_dir, modules={"pool_envs": ENVIRONMENTS}, **task) as pool, asyncio.timeout(DEADLINE_S):
        yield pool


def turn(*completions: str, sample: int = 0) -> PlayTurn:
    return PlayTurn(
        group_id=1,
        sample_index=sample,
        lease=10 * sample + len(completions),
        split="train",
        prompt_index=1,
        completions=completions,
        last_token=0,
    )


async def ask(pool: AskedPool, *completions: str, sample: int = 0) -> TurnAnswer:
    (result,) = await pool.play([turn(*completions, sample=sample)])
    return result


async def game(pool: AskedPool, completions: Sequence[str], *, sample: int = 0) -> list[TurnAnswer]:
    return [await ask(pool, *completions[: n + 1], sample=sample) for n in range(len(completions))]


async def test_a_game_from_the_first_turn_to_the_reward(tmp_path: Path) -> None:
    async with running(tmp_path) as pool:
        (prompt,) = await pool.prompts(split="train", first_index=1, count=1)
        turns = await game(pool, ["a", "b", "end"])
        assert [result.lease for result in turns] == [1, 2, 3]
        assert [(result.reward, result.done) for result in turns] == [(0.25, False), (0.25, False), (0.25, True)]
        assert turns[1].observation.startswith(f"{prompt.text} a/b ")
        request = ScoreSample(
            group_id=1, sample_index=0, split="train", prompt_index=1, completion="no", environment_reward=0.75
        )
        (score,) = await pool.score([request])
        assert score.parts == {"game": 0.75, "right": 0.0}
        assert score.reward == 0.375


@pytest.mark.parametrize(
    ("completion", "kind", "error"),
    [
        ("hang", "timeout", "environment: took longer than 5 s"),
        ("sleep", "timeout", "environment: took longer than 5 s"),
        ("raise", "raised", "environment: raised RuntimeError: two lines ? (pool_envs.py, line 23)"),
        ("exit", "raised", "environment: raised SystemExit: 3 (pool_envs.py, line 25)"),
        ("die", "died", "its process ended with status 7"),
        ("nonsense", "bad_value", "environment: step must return (observation, reward, done), got 42 (int)"),
        ("infinite", "bad_value", "environment: reward must be a finite number, got inf (float)"),
    ],
)
async def test_a_failure_is_its_samples_own_and_counted(completion: str, kind: str, error: str, tmp_path: Path) -> None:
    async with running(tmp_path, timeout_s=HANG_S if kind == "timeout" else TIMEOUT_S) as pool:
        before = [await ask(pool, "a", sample=sample) for sample in range(4)]
        asked = [turn("a", completion if sample == 2 else "b", sample=sample) for sample in range(4)]
        results = await pool.play(asked)
        assert [result.kind for result in results] == [None, None, kind, None]
        assert results[2].error == error
        assert pool.failures[kind] == 1
        assert pool.failures.total() == 1
        assert {result.observation for result in before} == {before[0].observation}
        played = {result.observation for result in results if result.kind is None}
        assert len(played) == 1, "those that had to be made again go on as if nothing had happened"


async def test_a_worker_is_killed_in_the_midst_of_games_and_they_go_on(tmp_path: Path) -> None:
    words = ["a", "b", "c", "d", "end"]
    async with running(tmp_path) as pool:
        whole = await game(pool, words)
        pid = int((await ask(pool, "pid", sample=9)).observation)
        played = []
        for number in range(len(words)):
            os.kill(pid, signal.SIGKILL)
            played.append(await ask(pool, *words[: number + 1], sample=1))
            pid = int((await ask(pool, "pid", sample=9)).observation)
        assert [result.observation for result in played] == [result.observation for result in whole]
        assert [result.done for result in played] == [False, False, False, False, True]
        assert pool.failures.total() == 0


async def test_games_that_fill_the_memory_together_are_made_again_and_one_that_does_it_alone_fails(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, memory_limit_bytes=256 << 20, processes=1) as pool:
        thin = await pool.play([turn("a", sample=sample) for sample in range(12)])
        first = await pool.play([turn("a", "fat", sample=sample) for sample in range(12)])
        second = await pool.play([turn("a", "fat", "b", sample=sample) for sample in range(12)])
        assert [result.error for result in [*thin, *first, *second]] == [""] * 36
        assert {result.observation for result in second} == {second[0].observation}
        assert second[0].observation.split()[1] == "a/fat/b"
        assert pool.failures.total() == 0
        (alone,) = await pool.play([turn("too fat")])
        assert (alone.kind, alone.error) == ("memory", "environment: ran out of memory")


async def test_all_turns_of_a_sample_go_to_one_process(tmp_path: Path) -> None:
    async with running(tmp_path, processes=3) as pool:
        games = await asyncio.gather(*(game(pool, ["pid"] * 4, sample=sample) for sample in range(12)))
        processes = [{result.observation for result in results} for results in games]
        assert all(len(found) == 1 for found in processes)
        assert len(set.union(*processes)) > 1


async def test_a_game_that_takes_long_holds_up_only_its_own_process(tmp_path: Path) -> None:
    async with running(tmp_path, processes=2) as pool:
        by_process: dict[str, list[int]] = {}
        for sample in range(8):
            by_process.setdefault((await ask(pool, "pid", sample=sample)).observation, []).append(sample)
        one, other = by_process.values()
        told = tmp_path / "go on"
        waiting = asyncio.create_task(ask(pool, "pid", f"wait for {told}", sample=one[0]))
        answered = await ask(pool, "pid", "a", sample=other[0])
        assert answered.kind is None
        assert not waiting.done()
        told.touch()
        assert (await waiting).kind is None


async def test_observations_are_cut_and_can_travel(tmp_path: Path) -> None:
    async with running(tmp_path) as pool:
        assert (await ask(pool, "long")).observation == "x" * 50
        assert (await ask(pool, "odd")).observation == "?"
        assert (await ask(pool, "a\u2028\U0001f600\x00")).kind is None


async def test_with_a_chat_template_a_game_reads_as_one_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompt, turns and observations, tokenized piece by piece, are what the template makes of the whole."""
    tokenizer = chat_tokenizer()

    def tokens_of(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    monkeypatch.setenv(ENV_MODEL_PATH, save_tokenizer(tmp_path / "model"))
    async with running(tmp_path, chat={"systemPrompt": "Play."}) as pool:
        (prompt,) = await pool.prompts(split="train", first_index=1, count=1)
        tokens, ended = tokens_of(prompt.text), tokenizer.eos_token_id
        said = ["a", "cut", "c"]
        for number, text in enumerate(said):
            last = [] if text == "cut" else [ended]
            tokens += [*tokens_of(text), *last]
            request = replace(turn(*said[: number + 1]), last_token=tokens[-1])
            (answer,) = await pool.play([request])
            tokens += tokens_of(answer.observation)
    plain = [user_turn(text) for text in tokenizer.decode(tokens).split("<|im_start|>user\n")[2:]]
    question = prompt.text.split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
    messages = [{"role": "system", "content": "Play."}, {"role": "user", "content": question}]
    for text, observation in zip(said, plain, strict=True):
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": observation}]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(tokens) == whole


def user_turn(text: str) -> str:
    """A user's turn without its end."""
    return text.split("<|im_end|>", maxsplit=1)[0]
