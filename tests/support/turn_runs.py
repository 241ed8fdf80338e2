"""Runs of a game in which each turn of the model earns a quarter: kills in the middle, and the sums that must come out."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from streamrl_workers.metrics.jsonl import read_jsonl
from support.runs import LocalRun, streamrl

WORKERS = ("scheduler", "trainer-0", "generator-sim-0", "generator-sim-1")
AGENT_LINKS = ("agents-0", "agents-1")
"""Of a run with a pool of two agent hosts."""

PROGRAM = """
import json, os, sys, threading, time, urllib.request

def begin(item):
    messages = [{"role": "user", "content": item["question"]}]

    def call(path, **body):
        key = item.get("api_key") or os.environ["OPENAI_API_KEY"]
        headers = {"authorization": "Bearer " + key, "content-type": "application/json"}
        request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers)
        return json.load(urllib.request.urlopen(request))

    def turn():
        message = call("/chat/completions", messages=messages)["choices"][0]["message"]
        assert message["content"] in (item["question"], "wrong"), message
        messages.append(message)
        messages.append({"role": "user", "content": "o" * (len(messages) // 2)})
        call("/reward", reward=0.25)

    return messages, call, turn
"""
"""A client of a few milliseconds: hundreds of them are started."""

FAIR = """
def play(item):
    _, call, turn = begin(item)
    for _ in range(1 + item["seed"] % 4):
        turn()
    return call
"""
ONE = """
play(json.load(sys.stdin))
"""
MANY = """
for line in sys.stdin:
    threading.Thread(target=lambda item: play(item)("/end"), args=[json.loads(line)], daemon=True).start()
"""
BRANCHING = """
def play(item):
    messages, call, turn = begin(item)
    for number in range(2 + item["seed"] % 4):
        if number % 2:
            messages[:] = [{"role": "user", "content": item["question"]}]
        turn()
    return call
"""
"""Begins anew each time that it has heard of something: a turn that is lost in a context would be another program's."""


def lines(run: LocalRun, name: str) -> list[dict[str, Any]]:
    """Of a file of the run's metrics."""
    return list(read_jsonl(run.folder / "metrics" / name))


def kill_in_turn(
    run: LocalRun, victims: Iterable[tuple[int, str]], *, others: Callable[[LocalRun, str], object]
) -> None:
    """Kill each at its step: a worker, `all` of them, or one that `others` finds."""
    for moment, victim in victims:
        run.wait_steps(moment)
        assert run.process.poll() is None, f"ended before the kill at step {moment}: {run.logs()}"
        if victim == "all":
            run.kill_all(WORKERS)
            run.assert_exact()
            run.resume()
        elif victim in (*WORKERS, *AGENT_LINKS):
            run.kill_one(victim)
        else:
            others(run, victim)


def assert_each_turn_earned_a_quarter(run: LocalRun, *, steps: int) -> None:
    """The run has ended well: every step and every evaluation has the sums of its turns, so no turn was lost or played twice."""
    assert run.wait_end() == 0, run.logs()
    run.assert_exact()
    done = lines(run, "steps.jsonl")
    assert {line["step"] for line in done} == set(range(steps))
    for line in done:
        assert line["reward_failed"] == 0
        assert line["reward_mean"] == pytest.approx(0.25 * line["turns_mean"])
    assert len({round(line["turns_mean"], 3) for line in done}) > 3, "games of different lengths"
    rewards = {line["mean_reward"] for line in lines(run, "evaluations.jsonl")}
    assert len(rewards) == 1, "the held-out games are the same in every evaluation"
    assert rewards.pop() > 0.25
    shown = streamrl("journal", "show", str(run.folder), str(4 * steps - 1)).stdout
    assert "(rewards 0.25" in shown, shown
