"""An agent: a game that is played through OpenAI's client. Nothing here is of StreamRL but the addresses `reward` and `end`.

A number from 0 to 9 is hidden. The model names one number a turn and hears `up` or `down` until it has found it. Who halves what is
left needs four turns at most, and the agent plays four. One process plays many games, each with a key of its own.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from random import Random

from openai import OpenAI

HIGHEST = 9
TURNS = 4
GAMES = 128
"""As `sessionsPerProgram` in the job."""


def play(client: OpenAI, secret: int) -> float:
    """Play one game; 1 where the number is found."""
    messages = [{"role": "user", "content": f"guess 0-{HIGHEST}\n"}]
    for _ in range(TURNS):
        answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content
        if not answer.isdecimal():
            return 0.0
        if int(answer) == secret:
            return 1.0
        heard = "up\n" if int(answer) < secret else "down\n"
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": heard}]
    return 0.0


def serve(client: OpenAI, item: dict) -> None:
    """Play the game of one item, and say what it earned, or why it has failed."""
    end = {}
    try:
        reward = play(client, Random(item["seed"]).randint(0, HIGHEST))
        client.post("/reward", body={"reward": reward}, cast_to=object)
    except Exception as error:  # noqa: BLE001 - whatever it is, this game has failed
        end = {"error": f"{type(error).__name__}: {error}"}
    client.post("/end", body=end, cast_to=object)


if __name__ == "__main__":
    common = OpenAI(api_key="one for each game")
    with ThreadPoolExecutor(GAMES) as games:
        for line in sys.stdin:
            item = json.loads(line)
            games.submit(serve, common.with_options(api_key=item["api_key"]), item)
