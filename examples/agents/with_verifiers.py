"""An environment of `verifiers`: its own rollout with tools, and its own rubric, whose reward is posted.

Needs `pip install "verifiers<0.4"`. One program plays one item: the job has no `sessionsPerProgram`.
"""

import asyncio
import json

import tools
import verifiers as vf
from datasets import Dataset
from openai import AsyncOpenAI


def load_environment(item: dict) -> vf.Environment:
    """As packages of environments have it, for one item."""

    def search(query: str) -> str:
        """Search in the notes."""
        return tools.search(item["metadata"]["notes"], query)

    def right(completion: list, answer: str) -> float:
        return float(completion[-1]["content"].strip() == answer)

    rows = Dataset.from_list([{"question": item["question"], "answer": item["answer"]}])
    actions = [search, tools.calculate]
    return vf.ToolEnv(dataset=rows, tools=actions, rubric=vf.Rubric(funcs=[right]), max_turns=4)


async def main(item: dict) -> None:
    env, client = load_environment(item), AsyncOpenAI()
    output = await env.run_rollout(
        env.get_dataset()[0], vf.OpenAIChatCompletionsClient(client), model="policy", sampling_args={}
    )
    await client.post("/reward", body={"reward": output["reward"]}, cast_to=object)


if __name__ == "__main__":
    asyncio.run(main(json.loads(input())))
