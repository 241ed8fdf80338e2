"""The agent of `apples.py` by OpenAI's Agents SDK, which asks by chat completions, or by the Responses API.

    command: [python, with_openai_agents.py, chat]        # or responses

Needs `pip install openai-agents`. One program plays one item: the job has no `sessionsPerProgram`.
"""

import asyncio
import json
import sys

import tools
from openai import AsyncOpenAI

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled

MODELS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


async def main(item: dict, model: str) -> None:
    @function_tool
    def search(query: str) -> str:
        """Search in the notes."""
        return tools.search(item["metadata"]["notes"], query)

    calculate = function_tool(tools.calculate)
    client = AsyncOpenAI()
    agent = Agent(name="apples", model=MODELS[model]("policy", client), tools=[search, calculate])
    result = await Runner.run(agent, item["question"])
    right = result.final_output.strip() == item["answer"]
    await client.post("/reward", body={"reward": float(right)}, cast_to=object)


if __name__ == "__main__":
    set_tracing_disabled(True)  # traces would go to OpenAI
    asyncio.run(main(json.loads(input()), sys.argv[1]))
