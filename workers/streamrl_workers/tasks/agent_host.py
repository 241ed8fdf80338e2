"""What the task pool's processes do for agents.

- The agent host (`serve_agents`) makes prompts and answers turns, many at once; `agents/host.py` does the work. Loop: consumes
  [number, request], with the item in it where there is no data set; produces [number, PLAYING] whenever a program is waited
  for, then [number, row]; ended by the end of its socket, and with it all programs.
- The item reader (`read_items`) reads items for agent hosts that have no data set. Loop: consumes [number, [split, index]], one at a
  time; produces [number, MAKING_ITEM], then [number, text] or [number, failure]; ended by the end of its socket.
"""

import asyncio
import functools
import json
import socket
from collections.abc import Callable
from typing import Any

from streamrl_workers.agents.host import AgentHost, AgentItem, Play
from streamrl_workers.agents.session import AgentError
from streamrl_workers.agents.transcript import Reading, Turn
from streamrl_workers.process import framing
from streamrl_workers.tasks import protocol
from streamrl_workers.tasks.dataset import TaskDataset
from streamrl_workers.tasks.protocol import MAKING_ITEM, MAX_ITEM_BYTES, PLAYING, failure
from streamrl_workers.tasks.values import NeedPrompts, PlayTurn, Request, Split
from streamrl_workers.tasks.worker import ITEMS_KEPT, MAX_ERROR_CHARS, Row, TaskSources, failure_row

WHERE = "agent: "


def serve_agents(connection: socket.socket, sources: TaskSources) -> int:
    """Run agents until the pool closes the socket. Returns the exit status."""
    return asyncio.run(_serve(connection, sources))


async def _serve(connection: socket.socket, sources: TaskSources) -> int:
    assert sources.agents is not None
    host = AgentHost(sources.agents)
    await host.start()
    item_of = functools.lru_cache(maxsize=ITEMS_KEPT)(functools.partial(_item, sources.dataset.only))
    transport, frames = await framing.open_frames(connection)
    answering: set[asyncio.Task[None]] = set()
    while (message := await frames.read(limit_s=framing.FOREVER_S)) is not None:
        number, (name, fields, *item) = message
        asked = protocol.decode_request([name, fields])
        reads = functools.partial(_told_item, *item) if item else item_of
        answer = _answer(host, sources.dataset.only, transport, number=number, request=asked, item_of=reads)
        task = asyncio.create_task(answer, name=f"agent-{number}")
        answering.add(task)
        task.add_done_callback(answering.discard)
    for task in answering:
        task.cancel()
    await asyncio.gather(*answering, return_exceptions=True)
    await host.close()
    return 0


ItemOf = Callable[[Split, int], AgentItem]


async def _answer(
    host: AgentHost,
    dataset: TaskDataset,
    transport: asyncio.Transport,
    *,
    number: int,
    request: Request,
    item_of: ItemOf,
) -> None:
    def say(value: Any) -> None:  # noqa: ANN401 - JSON
        framing.send(transport, [number, value])

    try:
        row = await _row(host, dataset, request, item_of=item_of, begun=lambda: say(PLAYING))
    except AgentError as error:
        row = failure(error.kind, f"{WHERE}{error}"[:MAX_ERROR_CHARS])
    except Exception as error:  # noqa: BLE001 - whatever keeps an item from being done is its failure
        row = failure_row(WHERE, error)
    say(row)


async def _row(
    host: AgentHost, dataset: TaskDataset, request: Request, *, item_of: ItemOf, begun: Callable[[], None]
) -> Row:
    match request:
        case NeedPrompts():
            item = item_of(request.split, request.first_index)
            prompt = await host.prompt(item, begun=begun)
            if prompt is None:  # the run goes on: its samples will hear what was wrong
                prompt = item.question if dataset.chat is None else dataset.chat.prompt(item.question)
            return protocol.prompt_row(prompt, answer=item.answer, metadata=item.metadata)
        case PlayTurn():
            item = item_of(request.split, request.prompt_index)
            result = await host.play(item, _play(dataset, request), begun=begun)
            return [result.observation, result.reward, result.done, result.context]
    raise AssertionError("the agent host makes prompts and answers turns")


def _item(dataset: TaskDataset, split: Split, index: int) -> AgentItem:
    question = dataset.question(split, index)
    return AgentItem(
        split=split, index=index, question=question.question, answer=question.answer, metadata=question.metadata
    )


def _told_item(text: str, split: Split, index: int) -> AgentItem:
    return AgentItem(split=split, index=index, **json.loads(text))


def read_items(connection: socket.socket, sources: TaskSources) -> int:
    """Read items until the pool closes the socket. Returns the exit status."""
    while (message := framing.receive(connection)) is not None:
        number, (split, index) = message
        connection.sendall(framing.encode([number, MAKING_ITEM]))
        try:
            row: Any = _item_text(sources.dataset.only, split, index)
        except Exception as error:  # noqa: BLE001 - whatever keeps an item from being read is its failure
            row = failure_row(WHERE, error)
        connection.sendall(framing.encode([number, row]))
    return 0


def _item_text(dataset: TaskDataset, split: Split, index: int) -> str:
    question = dataset.question(split, index)
    item = {"question": question.question, "answer": question.answer, "metadata": dict(question.metadata)}
    text = json.dumps(item, default=str)
    if len(text) > MAX_ITEM_BYTES:
        raise ValueError(f"an item for an agent must have at most {MAX_ITEM_BYTES} bytes, it has {len(text)}")
    return text


def _play(dataset: TaskDataset, request: PlayTurn) -> Play:
    turns = [
        Turn(text=text, finish_reason=reason, context_tokens=before, tokens=own)
        for text, reason, (before, own) in zip(
            request.completions, request.finish_reasons, request.token_counts, strict=True
        )
    ]
    return Play(
        key=(request.group_id, request.sample_index),
        prompt=request.prompt,
        turns=turns,
        observations=[
            Reading(text=text, context=place in request.contexts) for place, text in enumerate(request.observations)
        ],
        end="" if dataset.chat is None else dataset.chat.ends.get(request.last_token, ""),
    )
