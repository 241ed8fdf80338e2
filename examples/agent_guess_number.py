"""An agent of its own: OpenAI's client and a game. It knows nothing of training; the endpoint is in its environment.

A number from 0 to 9 is hidden. The model names one number a turn and hears `up` or `down` until it has found it. Who halves what is
left needs four turns at most, and the agent plays four.
"""

import json
import sys
from random import Random

from openai import OpenAI

HIGHEST = 9
TURNS = 4


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


if __name__ == "__main__":
    item = json.load(sys.stdin)
    client = OpenAI()
    reward = play(client, Random(item["seed"]).randint(0, HIGHEST))
    client.post("/reward", body={"reward": reward}, cast_to=object)
