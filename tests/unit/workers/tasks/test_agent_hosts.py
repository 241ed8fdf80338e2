"""Who plays what, as hosts come and go: no request is lost, none is answered twice, and a session stays where it is."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl_workers.scheduler import effects as fx
from streamrl_workers.scheduler.records import Dropped
from streamrl_workers.scheduler.server.executor import Executor
from streamrl_workers.scheduler.server.guests import watch_drops
from streamrl_workers.scheduler.server.lifetime import ExitDecision
from streamrl_workers.tasks import agent_hosts
from streamrl_workers.tasks.agent_hosts import MAX_LOSSES, MAX_LOSSES_UNSTARTED, AgentHosts, HostedItem
from streamrl_workers.tasks.pool import TaskPool
from streamrl_workers.tasks.values import NeedPrompts, PlayTurn, Request, ScoreSample, TaskPoolError
from streamrl_workers.tasks.worker_slots import WorkItem
from support.task_jobs import make_job

PLACES = 2


def turn(sample: int, *, turns: int = 1, item: int = 0) -> PlayTurn:
    texts = ("a",) * turns
    return PlayTurn(
        group_id=item, sample_index=sample, lease=1, split="train", prompt_index=item, completions=texts, last_token=0
    )


def prompt(item: int) -> NeedPrompts:
    return NeedPrompts(split="train", first_index=item, count=1)


@dataclass
class Hosts:
    """The hosts of a job, and what each was sent and has not answered."""

    sent: dict[str, dict[int, Any]] = field(default_factory=dict)
    done: list[tuple[Request, Any]] = field(default_factory=list)
    lives: int = 0

    def __post_init__(self) -> None:
        self.all = AgentHosts(sessions=PLACES, max_turns=3, awaited="pods", finish=self._finish)

    def _finish(self, work: WorkItem, row: Any) -> None:
        self.done.append((work.request, row))

    def join(self, name: str, *, instance: str = "") -> None:
        sent = self.sent[name] = {}
        self.lives += 1

        def send(number: int, asked: HostedItem) -> None:
            assert asked.item == "{}"
            assert len(sent) < PLACES, "no more than it has places"
            sent[number] = json.loads(asked.message())[1]

        self.all.joined(name, instance=instance or f"life {self.lives}", send=send)

    def ask(self, *requests: Request) -> None:
        for request in requests:
            self.all.ask(WorkItem(request=request), item="{}")

    def answer(self, name: str, *, ends: bool = False) -> None:
        """Its oldest request."""
        number, fields = next(iter(self.sent[name].items()))
        del self.sent[name][number]
        self.all.answered(
            name, number, ["next", 0.0, ends, False] if "completions" in fields else ["prompt", [None, ""], None]
        )

    def begin(self, name: str) -> None:
        """A program works on its oldest request."""
        self.all.started(name, next(iter(self.sent[name])))

    def samples(self, name: str) -> list[int]:
        return [fields.get("sample_index", -1) for fields in self.sent[name].values()]


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not come")


async def test_what_waits_takes_the_places_that_there_are_and_turns_go_first() -> None:
    hosts = Hosts()
    hosts.ask(*(prompt(item) for item in range(4)), *(turn(sample, item=9) for sample in range(3)))
    assert (hosts.all.numbers["waiting"], hosts.all.numbers["waiting_prompts"]) == (3, 4)
    hosts.join("a")
    assert hosts.samples("a") == [0, 1]
    hosts.join("b")
    assert hosts.samples("b") == [2, -1]
    hosts.answer("a", ends=True)
    assert hosts.samples("a") == [1, -1]
    expected = {"places": 2, "hosts": 2, "sessions": 2, "asked": 4, "waiting": 0, "waiting_prompts": 2}
    assert hosts.all.numbers == expected


async def test_a_session_stays_with_its_host_and_new_ones_go_where_there_are_fewest() -> None:
    hosts = Hosts()
    hosts.join("a")
    hosts.ask(turn(0), turn(1))
    for _ in range(2):
        hosts.answer("a")
    hosts.join("b")
    hosts.ask(turn(0, turns=2), turn(1, turns=2), turn(2))
    assert (hosts.samples("a"), hosts.samples("b")) == ([0, 1], [2])
    hosts.ask(turn(0, turns=3))
    assert hosts.all.numbers["waiting"] == 1, "its host has no place, and only that has heard its turns"
    hosts.answer("a")
    assert hosts.samples("a") == [1, 0]


async def test_the_first_sample_of_an_item_goes_to_the_program_that_made_its_prompt() -> None:
    hosts = Hosts()
    hosts.join("a")
    hosts.ask(prompt(5))
    hosts.join("b")
    hosts.answer("a")
    assert hosts.all.numbers["sessions"] == 0
    hosts.ask(turn(0, item=5), turn(1, item=5))
    assert (hosts.samples("a"), hosts.samples("b")) == ([0], [1]), "the first, though the other has none"


@pytest.mark.parametrize("way", ["another life", "no return"])
async def test_what_a_lost_host_had_is_asked_elsewhere(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_hosts, "RESUME_S", 0.0)
    hosts = Hosts()
    hosts.join("a")
    hosts.ask(turn(0), turn(1), turn(2))
    hosts.join("b")
    assert hosts.samples("b") == [2]
    hosts.all.left("a")
    if way == "another life":
        hosts.join("a")
        assert sorted(hosts.samples("a") + hosts.samples("b")) == [0, 1, 2]
    else:
        await until(lambda: len(hosts.sent["b"]) == 2)
        assert hosts.samples("b") == [2, 0], "the oldest first"
        hosts.answer("b", ends=True)
        assert hosts.samples("b") == [0, 1]


async def test_a_link_that_comes_back_is_asked_the_same_under_the_same_numbers() -> None:
    hosts = Hosts()
    hosts.join("a", instance="one")
    hosts.ask(turn(0), turn(1))
    numbers = list(hosts.sent["a"])
    hosts.all.left("a")
    hosts.join("b")
    hosts.ask(turn(0, turns=2))
    hosts.join("a", instance="one")
    assert list(hosts.sent["a"]) == numbers
    assert hosts.sent["b"] == {}, "its session is not theirs to take"


async def test_a_link_that_comes_back_announces_its_silent_processes_again() -> None:
    hosts = Hosts()
    hosts.join("a", instance="one life")
    hosts.all.silent("a", ["the fork server has shown no sign of life"])
    assert [one.message for one in hosts.all.silences()] == ["a: the fork server has shown no sign of life"]
    hosts.join("a", instance="one life")
    assert list(hosts.all.silences()) == []


async def test_a_host_that_leaves_gets_nothing_more_and_is_nobodys_death() -> None:
    hosts = Hosts()
    for _ in range(2 * MAX_LOSSES):
        hosts.join("a")
        if not hosts.done and hosts.all.numbers["asked"] == 0:
            hosts.ask(turn(0), turn(1), turn(2))
        hosts.begin("a")
        hosts.all.leaving("a")
        assert len(hosts.sent["a"]) == 2
        hosts.all.left("a")
    assert hosts.done == []
    assert hosts.all.ended == {"left": 2 * MAX_LOSSES, "lost": 0}
    hosts.join("b")
    assert hosts.samples("b") == [0, 1]


async def test_a_turn_that_waited_with_a_host_that_leaves_has_waited_since_it_was_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosts, now_s = Hosts(), 0.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s)
    hosts.join("a")
    hosts.ask(turn(0))
    hosts.answer("a")
    hosts.ask(prompt(5), prompt(6), turn(0, turns=2))
    assert hosts.all.numbers["waiting"] == 1, "with its host"
    now_s = 10.0
    hosts.all.leaving("a")
    now_s = 15.0
    hosts.join("b")
    assert (hosts.samples("b"), hosts.all.waited_s) == ([0], 15.0)


async def test_a_request_that_loses_host_after_host_has_failed() -> None:
    hosts = Hosts()
    hosts.join("a")
    hosts.ask(turn(0), turn(1))
    for _ in range(MAX_LOSSES):
        assert hosts.done == []
        hosts.begin("a")
        hosts.all.left("a")
        hosts.join("a")
    ((request, row),) = hosts.done
    assert hosts.samples("a") == [1], "what had not started has lost nothing"
    assert hosts.all.ended == {"left": 0, "lost": MAX_LOSSES}
    assert (hosts.all.asked_again, hosts.all.waits) == (2 * MAX_LOSSES, 2 * MAX_LOSSES + 1)
    assert (request, row["kind"]) == (turn(0), "died")
    assert str(MAX_LOSSES) in row["error"]


async def test_a_request_that_ends_each_host_before_it_starts_has_failed() -> None:
    hosts = Hosts()
    hosts.join("a")
    hosts.ask(turn(0))
    for _ in range(MAX_LOSSES_UNSTARTED):
        assert hosts.done == []
        hosts.all.left("a")
        hosts.join("a")
    ((_, row),) = hosts.done
    assert (row["kind"], str(MAX_LOSSES_UNSTARTED) in row["error"]) == ("died", True)


def pool_with_hosts(base_dir: Path) -> tuple[TaskPool, AgentHosts]:
    """A pool without processes, and its hosts."""
    job = make_job(agent={"command": ["x"], "pool": {}}, rewards=[{"name": "game", "environment": {}}])
    pool = TaskPool(job, base_dir=base_dir)
    assert pool.agent_hosts is not None
    return pool, pool.agent_hosts


async def test_a_prompt_that_loses_host_after_host_is_no_fault_of_the_job(tmp_path: Path) -> None:
    pool, hosts = pool_with_hosts(tmp_path)
    hosts.ask(WorkItem(request=prompt(7)), item="{}")
    for life in range(MAX_LOSSES + 1):
        hosts.joined("a", instance=f"life {life}", send=lambda *_: None)
        hosts.started("a", life + 1)
    with pytest.raises(TaskPoolError, match=f"train prompt 7 was not made: agent: {MAX_LOSSES} agent hosts were lost"):
        await pool.results()


async def test_a_session_ends_with_its_sample_or_its_group(tmp_path: Path) -> None:
    """However that ends: by the scheduler's own limits, or because the group is dropped."""
    pool, hosts = pool_with_hosts(tmp_path)
    hosts.joined("a", instance="one", send=lambda *_: None)
    for sample in range(3):
        hosts.ask(WorkItem(request=turn(sample)), item="{}")
    for number in range(1, 4):
        hosts.answered("a", number, ["next", 0.0, False, False])
    assert hosts.numbers["sessions"] == 3
    pool.put(ScoreSample(group_id=0, sample_index=1, split="train", prompt_index=0, completion="a"))
    assert hosts.numbers["sessions"] == 2

    nowhere: Any = SimpleNamespace(to_generator=None, to_trainer=None, append=lambda _: None, has_more=False)
    executor = Executor(nowhere, journal=nowhere, connections=nowhere, status=nowhere, ending=ExitDecision())
    executor.attach(pool)
    watch_drops(executor, hosts)
    for group_id, left in ((1, 2), (0, 0)):
        dropped = Dropped(group_id=group_id, reason="too_old")
        executor.call(lambda dropped=dropped: [fx.Write(sequence=1, record=dropped)])
        assert hosts.numbers["sessions"] == left


@pytest.mark.parametrize(
    "row", [["text"], ["a", "b", False], ["\udc80", 0.0, False], None, {"kind": "odd", "error": ""}]
)
async def test_an_answer_that_is_none_is_that_requests_failure(row: Any) -> None:
    hosts = Hosts()
    hosts.join("a")
    hosts.ask(turn(0))
    (number,) = hosts.sent["a"]
    hosts.all.answered("a", number, row)
    assert [kind["kind"] for _, kind in hosts.done] == ["bad_value"]


async def test_answers_that_nobody_waits_for_change_nothing() -> None:
    hosts = Hosts()
    hosts.join("a")
    for name, number in (("a", 7), ("stranger", 1)):
        hosts.all.answered(name, number, ["next", 0.0, False])
        hosts.all.started(name, number)
    hosts.all.left("stranger")
    hosts.all.leaving("stranger")
    assert hosts.done == []


async def test_without_a_host_it_is_said_and_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agent_hosts, "LOOK_S", 0.0)
    hosts = Hosts()
    hosts.join("a")
    watch = asyncio.create_task(hosts.all.run(), name="watch")
    hosts.all.left("a")
    hosts.ask(turn(0))
    await until(lambda: "1 requests wait for an agent host" in caplog.text)
    monkeypatch.setattr(agent_hosts, "HOSTS_TIMEOUT_S", 0.0)
    with pytest.raises(TaskPoolError, match="awaited pods"):
        await watch


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_whatever_hosts_do_each_request_is_answered_once(data: st.DataObject) -> None:
    async def play() -> None:
        hosts, asked = Hosts(), 0
        for _ in range(data.draw(st.integers(1, 60))):
            name = data.draw(st.sampled_from("abc"))
            match data.draw(st.sampled_from(["ask", "answer", "begin", "join", "resume", "leaving", "left"])):
                case "ask":
                    sample = data.draw(st.integers(0, 5))
                    hosts.ask(data.draw(st.sampled_from([turn(sample), turn(sample, turns=2), prompt(sample)])))
                    asked += 1
                case "answer" if hosts.sent.get(name):
                    hosts.answer(name, ends=data.draw(st.booleans()))
                case "begin" if hosts.sent.get(name):
                    hosts.begin(name)
                case "join":
                    hosts.join(name)
                case "resume" if name in hosts.sent:
                    hosts.join(name, instance=f"kept {name}")
                case "leaving":
                    hosts.all.leaving(name)
                case "left":
                    hosts.all.left(name)
                    hosts.sent.pop(name, None)
            numbers = hosts.all.numbers
            waiting = numbers["waiting"] + numbers["waiting_prompts"]
            assert numbers["asked"] + waiting + len(hosts.done) == asked
            assert numbers["sessions"] <= PLACES * 3
        for name in "abc":
            hosts.join(name)
        while any(hosts.sent.values()):
            for name in "abc":
                if hosts.sent[name]:
                    hosts.answer(name)
        assert len(hosts.done) == asked

    asyncio.run(play())
