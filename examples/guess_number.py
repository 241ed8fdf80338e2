"""The user's own code of the example `guess-number`: a game of several turns, and the demonstrations that a model begins with.

A number from 0 to 9 is hidden. The model names one number a turn and hears `up` or `down` until it has found it:

    guess 0-9
    4
    up
    7
    down
    6

A won game earns 1, a lost one 0. Who halves what is left needs four turns at most, and the job gives four.
"""

import zlib
from collections.abc import Mapping
from random import Random
from typing import Any

HIGHEST = 9
DEMONSTRATED_TURNS = 4
LISTENING_PERCENT = 30
"""Share of the demonstrated guesses that heed what was heard; the others are any number."""


class Game:
    """One hidden number."""

    def __init__(self, secret: int) -> None:
        self.secret = secret

    def step(self, completion: str) -> tuple[str, float, bool]:
        """Answer a guess: what the model reads next, what the turn earns, whether the game is over."""
        try:
            guess = int(completion)
        except ValueError:
            return "", 0.0, True  # no number: the game is lost
        if guess == self.secret:
            return "", 1.0, True
        return ("up\n" if guess < self.secret else "down\n"), 0.0, False


def make(*, question: str, answer: str | None, metadata: Mapping[str, Any], seed: int) -> Game:
    """The environment of one item: its seed hides the number, so every sample of a group plays the same game."""
    del question, answer, metadata
    return Game(Random(seed).randint(0, HIGHEST))


def careless(*, question: str, answer: str | None, metadata: Mapping[str, Any]) -> dict[str, str]:
    """A careless player: most of its guesses forget what it has heard. The question only decides which game it plays."""
    del answer, metadata
    random = Random(zlib.crc32(question.encode()))
    game, low, high, said = Game(random.randint(0, HIGHEST)), 0, HIGHEST, []
    for _ in range(DEMONSTRATED_TURNS):
        heeds = random.randrange(100) < LISTENING_PERCENT
        guess = random.randint(low, high) if heeds else random.randint(0, HIGHEST)
        observation, _, done = game.step(str(guess))
        said.append(f"{guess}\n{observation}")
        if done:
            break
        low, high = (max(low, guess + 1), high) if observation == "up\n" else (low, min(high, guess - 1))
    return {"prompt": f"guess 0-{HIGHEST}\n", "target": "".join(said)}
