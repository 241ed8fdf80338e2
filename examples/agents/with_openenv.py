"""An OpenEnv environment, behind its own server, played by OpenAI's client.

Here the server is `openenv_server.py`, started beside the program; give the address of another one to `GenericEnvClient`.
Needs `pip install openai openenv`. One program plays one item: the job has no `sessionsPerProgram`.
"""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

from apples import TOOLS
from openai import AsyncOpenAI
from openenv.core import GenericEnvClient

SERVER = Path(__file__).with_name("openenv_server.py")
TURNS = 4


async def play(item: dict, client: AsyncOpenAI, env: GenericEnvClient) -> float:
    """The environment's reward."""
    first = await env.reset(question=item["question"], answer=item["answer"], notes=item["metadata"]["notes"])
    messages = [{"role": "user", "content": first.observation["text"]}]
    for _ in range(TURNS):
        turn = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        answer = turn.choices[0].message
        messages.append(answer)
        if not answer.tool_calls:
            return (await env.step({"name": "answer", "argument": answer.content})).reward
        for call in answer.tool_calls:
            argument = " ".join(map(str, json.loads(call.function.arguments).values()))
            result = await env.step({"name": call.function.name, "argument": argument})
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result.observation["text"]})
    return 0.0


async def main(item: dict) -> None:
    server = await asyncio.create_subprocess_exec(sys.executable, str(SERVER), stdout=PIPE)
    address = (await server.stdout.readline()).decode().strip()
    client = AsyncOpenAI()
    async with GenericEnvClient(base_url=address) as env:
        reward = await play(item, client, env)
    await client.post("/reward", body={"reward": reward}, cast_to=object)
    server.kill()
    await server.wait()


if __name__ == "__main__":
    asyncio.run(main(json.loads(input())))
