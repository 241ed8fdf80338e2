"""A coding agent: the model writes a function, its tests run apart and with limits, and it reads what failed. Three tries.

Of the tests of its last try the share that passed is the reward. The limits stop loops and accidents. They are no wall: give the
task pool's container no network, or run the tests where you run code of strangers.
"""

import json
import re
import secrets
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from tempfile import TemporaryDirectory

from openai import OpenAI

TRIES = 3
ITEMS = 8
"""At a time, as `sessionsPerProgram` in the job."""
MOST_SHOWN = 1000
"""Characters of what failed."""
TIMEOUT_S = 10
LIMITS = """
import resource
for _kind, _most in {"CPU": 2, "AS": 1 << 30, "FSIZE": 1 << 20, "NOFILE": 32}.items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + _kind), (_most, _most))
"""
"""Seconds, bytes of memory, bytes of a file, open files."""
RUNNER = """
def _run(tests, key):
    import json
    failed = []
    for test in tests:
        try:
            assert eval(test, globals()), "is false"
        except BaseException as error:
            failed.append(f"{test}: {type(error).__name__}: {error}")
    print(key + json.dumps(failed))
"""


def run_tests(code: str, tests: list[str]) -> list[str]:
    """What failed, a line each."""
    key = secrets.token_hex(16)
    script = f"{LIMITS}\n{code}\n{RUNNER}\n_run({tests!r}, {key!r})"
    with TemporaryDirectory() as folder:
        try:
            run = subprocess.run(
                [sys.executable, "-I", "-"],
                cwd=folder,
                env={},
                input=script,
                capture_output=True,
                timeout=TIMEOUT_S,
                check=False,
                text=True,
                errors="replace",
            )
        except (subprocess.TimeoutExpired, ValueError) as error:
            return [f"{test}: {type(error).__name__}" for test in tests]
    _, found, failed = run.stdout.rpartition(key)
    if found:
        return json.loads(failed)
    said = run.stderr.strip().splitlines()
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
