"""An OpenEnv environment and its server: `search` and `calculate` are answered, `answer` ends the episode.

    python openenv_server.py      # serves on a free port of the loopback address, and writes its address

Needs `pip install openenv`.
"""

import socket
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from tools import calculate, search


class AppleAction(Action):
    """What is done, and with what."""

    name: str
    argument: str


class AppleObservation(Observation):
    """What is seen."""

    text: str = ""


class Apples(Environment):
    """The item comes with `reset`."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.item = {}
        self._state = State(step_count=0)

    @property
    def state(self) -> State:
        return self._state

    def reset(self, seed: int | None = None, episode_id: str | None = None, **item: object) -> AppleObservation:
        del seed
        self.item, self._state = item, State(episode_id=episode_id, step_count=0)
        return AppleObservation(text=str(item["question"]))

    def step(self, action: AppleAction, timeout_s: float | None = None, **options: object) -> AppleObservation:
        del timeout_s, options
        self._state.step_count += 1
        match action.name:
            case "search":
                return AppleObservation(text=search(self.item["notes"], action.argument), reward=0.0)
            case "calculate":
                return AppleObservation(text=calculate(action.argument), reward=0.0)
        return AppleObservation(done=True, reward=float(action.argument.strip() == self.item["answer"]))


if __name__ == "__main__":
    door = socket.create_server(("127.0.0.1", 0))
    sys.stdout.write(f"http://127.0.0.1:{door.getsockname()[1]}\n")
    sys.stdout.flush()
    app = create_fastapi_app(Apples, AppleAction, AppleObservation)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[door])
