"""Asks a task pool as tests think: a question, and its answers in order."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from streamrl_workers.tasks.pool import MEMORY_LIMIT_BYTES, TaskPool
from streamrl_workers.tasks.values import NeedPrompts, PlayTurn, Prompt, Request, Result, Score, ScoreSample, TurnAnswer
from support.runs import wait_for
from support.task_jobs import make_job, write_lines

WAIT_S = 240.0


def _key(value: Request | Result) -> Hashable:
    match value:
        case Prompt() | NeedPrompts():
            return value.split, value.index if isinstance(value, Prompt) else value.first_index
        case PlayTurn() | TurnAnswer():
            return "turn", value.group_id, value.sample_index, value.lease
    return "score", value.group_id, value.sample_index


def fork_servers() -> list[psutil.Process]:
    """Of the pools of this process, which may have other children: those of multiprocessing outlive their test."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "streamrl_workers.tasks.fork_server_process" in child.cmdline():
                found.append(child)
    return found


class AskedPool(TaskPool):
    """A pool whose results are matched to those who wait for them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._waiting: dict[Hashable, asyncio.Future[Any]] = {}
        self._matching: asyncio.Task[None] | None = None

    async def prompts(self, *, split: Any, first_index: int, count: int) -> list[Prompt]:
        """Prompts, in order."""
        if not count:
            return []
        wanted = [NeedPrompts(split=split, first_index=first_index + number, count=1) for number in range(count)]
        return await self._all(wanted, put=[NeedPrompts(split=split, first_index=first_index, count=count)])

    async def score(self, requests: Sequence[ScoreSample]) -> list[Score]:
        """Scores, in order."""
        return await self._all(requests, put=requests)

    async def play(self, requests: Sequence[PlayTurn]) -> list[TurnAnswer]:
        """Answers, in order."""
        return await self._all(requests, put=requests)

    async def _all(self, wanted: Sequence[Request], *, put: Sequence[Request]) -> list[Any]:
        if self._matching is None or self._matching.done():
            self._matching = asyncio.create_task(self._match(), name="match results")
        for request in put:
            self.put(request)
        return await asyncio.gather(*(self._result(one) for one in wanted))

    def _result(self, of: Request) -> "asyncio.Future[Any]":
        return self._waiting.setdefault(_key(of), asyncio.get_running_loop().create_future())

    async def _match(self) -> None:
        try:
            while True:
                for result in await self.results():
                    future = self._waiting.pop(_key(result))
                    if not future.done():  # nobody waits any more
                        future.set_result(result)
        except Exception as error:  # noqa: BLE001 - of the pool: whoever waits gets it
            for future in self._waiting.values():
                if not future.done():  # nobody waits any more
                    future.set_exception(error)
            self._waiting.clear()

    async def close(self) -> None:
        """Those who wait hear of it before this returns."""
        await super().close()
        if self._matching is not None:
            await self._matching


@contextlib.asynccontextmanager
async def running_pool(
    base_dir: Path,
    *,
    modules: Mapping[str, str],
    memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
    host: Path | None = None,
    run_dir: Path | None = None,
    **task: Any,
) -> AsyncIterator[AskedPool]:
    """A started pool with these modules of the user's beside its job; the data set, if none is named, has 60 sums."""
    for name, text in modules.items():
        (base_dir / f"{name}.py").write_text(text)
    if not {"dataset", "mixture"} & set(task):
        task["dataset"] = write_lines(base_dir / "lines.jsonl", count=60)
    limits = {"memory_limit_bytes": memory_limit_bytes, "host": host, "run_dir": run_dir}
    pool = AskedPool(make_job(**task), base_dir=base_dir, **limits)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


def samples(*completions: str) -> list[ScoreSample]:
    """Of each prompt, from the first on, one."""
    return [
        ScoreSample(group_id=number, sample_index=0, split="train", prompt_index=number, completion=text)
        for number, text in enumerate(completions)
    ]


async def scored(pool: AskedPool, *completions: str) -> list[Score]:
    """Their scores, in order."""
    async with asyncio.timeout(WAIT_S):
        results = await pool.score(samples(*completions))
    assert [result.group_id for result in results] == list(range(len(completions)))
    return results


async def wait_ended(processes: Sequence[psutil.Process]) -> None:
    """Until all have ended; a zombie that nobody has waited for has."""
    await asyncio.to_thread(wait_for, lambda: not any(map(_runs, processes)), what="the end of processes")


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
