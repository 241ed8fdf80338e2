"""The cases of the crash-point and the faults campaign, and how one is run.

    the way to the scenario's beginning ─▶ mark ─▶ act, with harm ─▶ all is well again ─▶ as undisturbed? ─▶ two resyncs without a write?

A case is its name: `create/killed/7` runs the same again. The undisturbed run of each scenario gives the picture that every other must end
with, the events that must have been told, and the number of writes.
"""

import asyncio
import contextlib
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from cluster.campaign.bench import DEADLINE_S, Bench, Station, WrongError, until
from cluster.campaign.faults import KillAt, LoseReply, Mixture, StaleLists, drawn
from cluster.campaign.normal import Picture, differences
from cluster.campaign.proxy import Fault, Reply
from cluster.campaign.scenarios import SCENARIOS, Scenario, way_to
from streamrl_operator.kube.kinds import CHILDREN, RLJOB

KILLED, ANSWERED, LOST, FAULTS = "killed", "answered", "lost", "faults"
CRASHES = (KILLED, ANSWERED, LOST)
"""Dead before the answer to write k arrives; dead before the next write; alive, but the answer was lost."""
_SILENCE_S = 1.0
"""An operator that has written nothing for so long has no further write to die before."""
_MAY_END_WITH = (75, -signal.SIGKILL)
"""Exit codes of an operator that lost its Lease, and of one that the campaign killed: it is started again."""
_STALE_S = 0.5
_ATTEMPTS = 5
"""To find a story at rest, where its end cannot be told from what goes before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One story with one harm."""

    scenario: str
    kind: str
    number: int
    """Of the write; or seed of the faults."""

    @property
    def name(self) -> str:
        """By which it can be run again."""
        return f"{self.scenario}/{self.kind}/{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Undisturbed:
    """How a scenario goes when nothing goes wrong."""

    picture: Picture
    told: "Counter[tuple[str, str]]"
    """Events since the mark."""
    writes: tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class Result:
    """How a case went."""

    name: str
    wrong: str = ""
    """Empty: well."""
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)


class Book:
    """The undisturbed runs, each made once, when it is first asked for."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._runs: dict[str, asyncio.Task[Undisturbed]] = {}

    async def of(self, scenario: str) -> Undisturbed:
        """The undisturbed run of a scenario."""
        if scenario not in self._runs:
            self._runs[scenario] = asyncio.create_task(self._run(SCENARIOS[scenario]), name=f"undisturbed {scenario}")
        return await self._runs[scenario]

    async def _run(self, scenario: Scenario) -> Undisturbed:
        async with self._bench.station(f"calm-{scenario.name}") as station:
            station.operator.start()
            await self.lead_to(station, scenario)
            before = Counter(await station.lab.told())
            station.proxy.mark()
            await scenario.act(station.lab)
            await station.wait_until_right(scenario.wrong)
            found = await at_rest(lambda: station.stays(None, looks=scenario.looks))
            writes = tuple(call.text for call in station.proxy.writes)
            return Undisturbed(picture=found, told=Counter(await station.lab.told()) - before, writes=writes)

    async def lead_to(self, station: Station, scenario: Scenario) -> None:
        """Bring an empty namespace, with an operator, to where the scenario begins."""
        for step in way_to(scenario.name):
            await step.act(station.lab)
            await station.wait_until_equal((await self.of(step.name)).picture, but=step.forgiven)


async def at_rest(stays: Callable[[], Awaitable[Picture]], *, attempts: int = _ATTEMPTS) -> Picture:
    """Its end, once it has found rest: the first look after all seems right may be followed by another write."""
    for _ in range(attempts - 1):
        with contextlib.suppress(WrongError):
            return await stays()
    return await stays()


async def judged(name: str, story: Callable[[Result], Awaitable[None]]) -> Result:
    """The result of a story, whatever happens in it."""
    begun_s, result = time.monotonic(), Result(name=name)
    try:
        await story(result)
    except WrongError as error:
        result.wrong = str(error)
    except Exception as error:  # noqa: BLE001 - one case must not end the campaign
        result.wrong = f"{type(error).__name__}: {error}"
    result.seconds = time.monotonic() - begun_s
    return result


async def run(case: Case, *, bench: Bench, book: Book) -> Result:
    """One case; its result. The undisturbed run, which the first case waits for, is in its seconds."""

    async def story(result: Result) -> None:
        await _STORIES[case.kind](case, bench, book, await book.of(case.scenario), result)

    return await judged(case.name, story)


async def _at_write(case: Case, bench: Bench, book: Book, undisturbed: Undisturbed, result: Result) -> None:
    """The operator dies at one write, or does not hear its answer."""
    scenario = SCENARIOS[case.scenario]
    async with bench.station(f"{case.kind}-{case.scenario}") as station:
        station.operator.start()
        await book.lead_to(station, scenario)
        told = Counter(await station.lab.told())
        death = KillAt(case.number, station.operator.kill, has_answer=case.kind == ANSWERED)
        fault = LoseReply(case.number) if case.kind == LOST else death
        station.proxy.mark()
        station.proxy.faults = (fault,)
        await scenario.act(station.lab)
        if fault is death:
            async with asyncio.timeout(DEADLINE_S):
                await _until_fired(station, death, undisturbed, result)
            station.proxy.faults = ()
            await station.restart()
        await _end(station, scenario, undisturbed, told)
        if not fault.fired:
            result.notes.append("so many writes were not made")


async def _until_fired(station: Station, fault: KillAt, undisturbed: Undisturbed, result: Result) -> None:
    """Until it is dead. Where the awaited write never comes, it dies when all is done."""
    while not fault.fired:
        try:
            await until(lambda: fault.fired, "the operator's death", deadline_s=_SILENCE_S)
        except WrongError:
            is_silent = time.monotonic() > station.proxy.last_write_s + _SILENCE_S
            if is_silent and not differences(await station.picture(), undisturbed.picture):
                result.notes.append(f"killed at rest, after {len(station.proxy.writes)} writes")
                fault.fire()


async def _disturb(case: Case, bench: Bench, book: Book, undisturbed: Undisturbed, result: Result) -> None:
    scenario = SCENARIOS[case.scenario]
    async with bench.station(f"{case.kind}-{case.scenario}") as station:
        station.operator.start()
        await book.lead_to(station, scenario)
        mixture = drawn(random.Random(case.name), writes=len(undisturbed.writes))
        result.notes.append("; ".join(map(str, mixture.faults)))
        past = await _lists(station) if mixture.travels else {}
        station.proxy.mark()
        station.proxy.faults = _with_death(mixture, past, station)
        nurse = asyncio.create_task(_nurse(station), name="nurse")
        try:
            await scenario.act(station.lab)
            await asyncio.sleep(mixture.window_s / 2)
            if mixture.steals:
                await station.lab.steal_lease()
            await asyncio.sleep(mixture.window_s / 2)
            station.proxy.faults = ()
            await _end(station, scenario, undisturbed, None)
        finally:
            nurse.cancel()


def _with_death(mixture: Mixture, past: dict[str, Reply], station: Station) -> tuple[Fault, ...]:
    """The faults, and where the operator dies of one more, the others after it: the next one may be told of the past first."""
    if not mixture.kill_at:
        return mixture.faults

    def die() -> None:
        station.operator.kill()
        station.was_killed = True
        station.proxy.faults = (*mixture.faults, *([StaleLists(past, _STALE_S)] if mixture.travels else []))

    return (KillAt(mixture.kill_at, die, has_answer=False), *mixture.faults)


async def _nurse(station: Station) -> None:
    """As a kubelet: an operator that ends is started again; the time of a killed one's Lease is over at once."""
    while True:
        await asyncio.sleep(0.1)
        if not station.operator.runs and station.was_killed:
            station.was_killed = False
            await station.lab.free_lease()
        station.operator.again()


async def _lists(station: Station) -> dict[str, Reply]:
    """What lists of all kinds say now."""
    found = {}
    for kind in (RLJOB, *CHILDREN):
        path = kind.path(station.lab.namespace)
        async with station.lab.session.get(station.lab.server + path) as answer:
            found[path] = Reply(
                status=answer.status, body=await answer.read(), headers={"Content-Type": "application/json"}
            )
    return found


async def _end(
    station: Station,
    scenario: Scenario,
    undisturbed: Undisturbed,
    told: "Counter[tuple[str, str]] | None",
) -> None:
    """The oracle. What is forgiven cannot be waited for: it may be all by which the end differs from the beginning."""
    await station.wait_until_right(scenario.left)
    await station.wait_until_equal(undisturbed.picture, but=scenario.forgiven)
    await at_rest(
        lambda: station.stays(undisturbed.picture, looks=scenario.looks, but=scenario.forgiven),
        attempts=_ATTEMPTS if scenario.forgiven else 1,
    )
    if traces := station.operator.traces():
        raise WrongError(f"an error of ours in the log: {traces[0][:400]}")
    if odd := [code for code in station.operator.codes if code not in _MAY_END_WITH]:
        raise WrongError(f"the operator ended by itself with {odd}")
    if told is None:
        return
    have = Counter(await station.lab.told()) - told
    missing, twice = _but(undisturbed.told - have, scenario), _but(have - undisturbed.told, scenario)
    if missing or twice:
        raise WrongError(f"events: missing {sorted(missing)}, too many {sorted(twice)}")


def _but(told: "Counter[tuple[str, str]]", scenario: Scenario) -> "Counter[tuple[str, str]]":
    """Without what the scenario forgives."""
    return Counter({one: times for one, times in told.items() if one[0] not in scenario.forgiven})


_Story = Callable[[Case, Bench, Book, Undisturbed, Result], Awaitable[None]]
_STORIES: dict[str, _Story] = {**dict.fromkeys(CRASHES, _at_write), FAULTS: _disturb}


def crashes(scenario: str, writes: int, *, kinds: Sequence[str] = CRASHES) -> list[str]:
    """Names of the cases of every write of a scenario, with every kind of crash."""
    return [f"{scenario}/{kind}/{number}" for number in range(1, writes + 1) for kind in kinds]
