"""The agent of `apples.py` with the tools of an MCP server, which it starts: `mcp_server.py`.

Needs `pip install openai "mcp<2"`. One program plays one item: the job has no `sessionsPerProgram`.
"""

import asyncio
import json
import sys
from pathlib import Path

from mcp import ClientSession, StdioServerParameters, stdio_client
from openai import AsyncOpenAI

SERVER = Path(__file__).with_name("mcp_server.py")


async def play(item: dict, client: AsyncOpenAI, server: ClientSession) -> str:
    """The answer."""
    functions = [
        {"name": tool.name, "description": tool.description, "parameters": tool.inputSchema}
        for tool in (await server.list_tools()).tools
    ]
    known = [{"type": "function", "function": function} for function in functions]
    messages = [{"role": "user", "content": item["question"]}]
    while True:
        turn = await client.chat.completions.create(model="policy", messages=messages, tools=known)
        answer = turn.choices[0].message
        messages.append(answer)
        if not answer.tool_calls:
            return answer.content
        for call in answer.tool_calls:
            result = await server.call_tool(call.function.name, json.loads(call.function.arguments))
            text = "".join(part.text for part in result.content)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})


async def main(item: dict) -> None:
    client = AsyncOpenAI()
    notes = json.dumps(item["metadata"]["notes"])
    program = StdioServerParameters(command=sys.executable, args=[str(SERVER), notes])
    async with stdio_client(program) as streams, ClientSession(*streams) as server:
        await server.initialize()
        right = (await play(item, client, server)).strip() == item["answer"]
        await client.post("/reward", body={"reward": float(right)}, cast_to=object)


if __name__ == "__main__":
    asyncio.run(main(json.loads(input())))
