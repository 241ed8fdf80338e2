"""An agent with tools, by OpenAI's client alone: it answers a question from notes that it can only search.

Nothing here is of StreamRL but the addresses `reward` and `end`. One process plays many items, each with a key of its own.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI
from tools import calculate, search

TURNS = 4
ITEMS = 64
"""At a time, as `sessionsPerProgram` in the job."""


def tool(name: str, argument: str) -> dict:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("search", "query"), tool("calculate", "expression")]


def run(call: object, notes: list[str]) -> str:
    """The result of a call, or what is wrong with it."""
    arguments = json.loads(call.function.arguments)
    try:
        if call.function.name == "search":
            return search(notes, **arguments)
        return calculate(**arguments)
    except (TypeError, AttributeError) as error:
        return str(error)


def play(client: OpenAI, item: dict) -> float:
    """1 for the right answer."""
    messages = [{"role": "user", "content": item["question"]}]
    for _ in range(TURNS):
        answer = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS).choices[0].message
        messages.append(answer)
        if not answer.tool_calls:
            return float(answer.content.strip() == item["answer"])
        for call in answer.tool_calls:
            result = run(call, item["metadata"]["notes"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


def serve(client: OpenAI, item: dict) -> None:
    """Play one item, and say what it earned, or why it has failed."""
    end = {}
    try:
        client.post("/reward", body={"reward": play(client, item)}, cast_to=object)
    except Exception as error:  # noqa: BLE001 - whatever it is, this item has failed
        end = {"error": f"{type(error).__name__}: {error}"}
    client.post("/end", body=end, cast_to=object)


if __name__ == "__main__":
    common = OpenAI(api_key="one for each item")
    with ThreadPoolExecutor(ITEMS) as items:
        for line in sys.stdin:
            item = json.loads(line)
            items.submit(serve, common.with_options(api_key=item["api_key"]), item)
