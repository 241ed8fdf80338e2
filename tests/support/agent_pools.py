"""Programs in a real task pool, and a sample's turns as the scheduler keeps them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from streamrl_workers.tasks.values import PlayTurn, TurnAnswer
from support.task_pools import AskedPool, fork_servers, running_pool

WAIT_S = 120.0
"""What must be answered is answered, however busy the machine is."""

CLIENT = """
import json, sys
from openai import OpenAI

item = json.load(sys.stdin)
client = OpenAI()
messages = [{"role": "user", "content": item["question"]}]

def ask(**options):
    return client.chat.completions.create(model="policy", messages=messages, **options)

def earn(reward):
    client.post("/reward", body={"reward": reward}, cast_to=object)
"""
"""How the programs here begin."""

SEVERAL_TURNS = """
for turn in range(3):
    answer = ask()
    messages.append(answer.choices[0].message)
    messages.append({"role": "user", "content": f"{turn}:{answer.choices[0].message.content}"})
    earn(0.25)
    earn(0.5)
assert item["seed"] >= 0 and item["answer"]
"""

GAME = {"name": "game", "environment": {}}


@dataclass(slots=True)
class Sample:
    """One sample as the scheduler keeps it."""

    pool: AskedPool
    prompt: str
    index: int = 0
    sample: int = 0
    end: int = 0
    """Token with which its turns end."""
    turns: list[str] = field(default_factory=list)
    observations: list[str] = field(default_factory=list)
    contexts: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    def request(self) -> PlayTurn:
        """What the scheduler asks about the newest turn."""
        return PlayTurn(
            group_id=self.index,
            sample_index=self.sample,
            lease=1000 * self.index + 100 * self.sample + len(self.turns),
            split="train",
            prompt_index=self.index,
            completions=tuple(self.turns),
            last_token=self.end,
            prompt=self.prompt,
            observations=tuple(self.observations),
            contexts=tuple(self.contexts),
            finish_reasons=tuple(self.reasons),
            token_counts=tuple((10 * turn, turn + 1) for turn in range(len(self.turns))),
        )

    async def say(self, text: str, *, reason: str = "stop") -> TurnAnswer:
        """The model's turn; what follows it."""
        self.turns.append(text)
        self.reasons.append(reason)
        async with asyncio.timeout(WAIT_S):
            (answer,) = await self.pool.play([self.request()])
        self.contexts += [len(self.observations)] if answer.context else []
        self.observations.append(answer.observation)
        return answer


@asynccontextmanager
async def agents(base_dir: Path, program: str, *, client: bool = True, **options: Any) -> AsyncIterator[AskedPool]:
    task = {name: options.pop(name) for name in ("chat", "sampling", "host") if name in options}
    agent = {"command": ["python", "agent.py"], **options}
    modules = {"agent": (CLIENT if client else "") + program}
    async with running_pool(base_dir, modules=modules, rewards=[GAME], agent=agent, **task) as pool:
        yield pool


async def begun(pool: AskedPool, *, index: int = 0, sample: int = 0) -> Sample:
    async with asyncio.timeout(WAIT_S):
        (prompt,) = await pool.prompts(split="train", first_index=index, count=1)
    return Sample(pool, prompt.text, index=index, sample=sample)


def hosts() -> list[psutil.Process]:
    """Agent hosts: workers of the fork server that have a program as child, or serve one."""
    return [worker for server in fork_servers() for worker in server.children() if worker.net_connections("tcp")]
