"""A Gymnasium environment whose actions and observations are texts, played by OpenAI's client.

Needs `pip install openai gymnasium`. One program plays one item: the job has no `sessionsPerProgram`.
"""

import json
import string

import gymnasium
from apples import TOOLS
from openai import OpenAI
from tools import calculate, search

TEXT = gymnasium.spaces.Text(4096, charset=string.printable)
TURNS = 4


class Apples(gymnasium.Env):
    """`search NAME` and `calculate SUM` are answered; any other text is the answer, and ends the episode."""

    action_space = observation_space = TEXT

    def __init__(self, item: dict) -> None:
        self.item = item

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        super().reset(seed=seed, options=options)
        return self.item["question"], {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        match action.split(maxsplit=1):
            case ["search", query]:
                return search(self.item["metadata"]["notes"], query), 0.0, False, False, {}
            case ["calculate", expression]:
                return calculate(expression), 0.0, False, False, {}
        return "", float(action.strip() == self.item["answer"]), True, False, {}


gymnasium.register("Apples-v0", entry_point=Apples, max_episode_steps=32)


def main(item: dict) -> None:
    client, env = OpenAI(), gymnasium.make("Apples-v0", item=item)
    observation, _ = env.reset(seed=item["seed"])
    messages = [{"role": "user", "content": observation}]
    for _ in range(TURNS):
        answer = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS).choices[0].message
        messages.append(answer)
        if not answer.tool_calls:
            _, reward, *_ = env.step(answer.content)
            client.post("/reward", body={"reward": reward}, cast_to=object)
            return
        for call in answer.tool_calls:
            arguments = " ".join(map(str, json.loads(call.function.arguments).values()))
            observation, *_ = env.step(f"{call.function.name} {arguments}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": observation})


if __name__ == "__main__":
    main(json.loads(input()))
