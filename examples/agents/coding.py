"""A coding agent: the model writes a function, its tests run apart and with limits, and it reads what failed. Three tries.

Of the tests of its last try the share that passed is the reward. The limits stop loops and accidents. They are no wall: give the
task pool's container no network, or run the tests where you run code of strangers. Code that attacks `builtins` or the frames
above it can still pass every test.
"""

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from tempfile import TemporaryDirectory, TemporaryFile

from openai import OpenAI

TRIES = 3
ITEMS = 8
"""At a time, as `sessionsPerProgram` in the job."""
MOST_SHOWN = 1000
"""Characters of what failed."""
TIMEOUT_S = 10
RUNNER = """
import json, os, resource, sys, types

for kind, most in {"CPU": 2, "AS": 1 << 30, "FSIZE": 1 << 20, "NOFILE": 32}.items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + kind), (most, most))

def why(test, space):
    try:
        return None if eval(test, space) else "is false"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:500]

code, tests = json.load(sys.stdin)
module = sys.modules["answer"] = types.ModuleType("answer")
exec(code, vars(module))
failed = [f"{test}: {reason}" for test in tests if (reason := why(test, vars(module)))]
with open(int(sys.argv[1]), "w") as result:
    json.dump(failed, result)
os._exit(0)
"""
"""Limits: seconds, bytes of memory, bytes of a file, open files. The model's code has a module of its own."""


def run_tests(code: str, tests: list[str]) -> list[str]:
    """What failed, a line each."""
    with TemporaryDirectory() as folder, TemporaryFile("w+") as result, TemporaryFile("w+", errors="replace") as errors:
        try:
            run = subprocess.run(
                [sys.executable, "-I", "-c", RUNNER, str(result.fileno())],
                cwd=folder,
                env={},
                input=json.dumps([code, tests]),
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=[result.fileno()],
                timeout=TIMEOUT_S,
                check=False,
                text=True,
            )
        except subprocess.TimeoutExpired as error:
            return [f"{test}: {type(error).__name__}" for test in tests]
        result.seek(0)
        errors.seek(0)
        if failed := result.read():
            return json.loads(failed)
        said = errors.read().strip().splitlines()
    return [f"{test}: {said[-1] if said else f'ended with status {run.returncode}'}" for test in tests]


def code_of(text: str) -> str:
    """The last Python block; the whole text if there is none."""
    blocks = re.findall(r"```(?:python)?\n(.*?)```", text, re.DOTALL)
    return blocks[-1] if blocks else text


def play(client: OpenAI, item: dict) -> float:
    """The share of the tests that pass at the end."""
    tests = item["metadata"]["tests"]
    messages = [{"role": "user", "content": item["question"]}]
    for tries_left in reversed(range(TRIES)):
        answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message
        failed = run_tests(code_of(answer.content), tests)
        if not failed or not tries_left:
            break
        messages += [answer, {"role": "user", "content": "Failed:\n" + "\n".join(failed)[:MOST_SHOWN]}]
    return 1 - len(failed) / len(tests)


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
