"""An exception at any call of the core, or at any effect: the core is dead from then on, and nothing is lost or doubled.

Everything of the scheduler but its sockets and its disk is real: core, executor, ending, numbers. What the next scheduler
finds is a prefix of what was appended, as the journal's writer leaves it; a real journal holds it at the end, and
`journal check` judges it. The default suite takes a sample; `make campaign-core` takes every method, effect and record, at the first, a
middle and the last call, before and behind what it does, in three modes.
"""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from streamrl.errors import EXIT_DONE, EXIT_FAULT
from streamrl_workers.scheduler import effects as fx
from streamrl_workers.scheduler.journal.check import Rules, check, read_facts
from streamrl_workers.scheduler.server.lifetime import ProcessExit
from support.core_faults import EFFECTS, EVENTS, READINGS, RECORDS, Fault, InjectedError, ShellWorld
from support.core_world import settings
from support.journals import write_journal

MODES: dict[str, dict[str, Any]] = {
    "StreamAsync": {"staleness": 1},
    "StreamSync": {"staleness": 0},
    "Batch": {"staleness": 1, "whole_batches": True},
}
TARGETS = (*EVENTS, *READINGS, *EFFECTS, *RECORDS)
UNREACHED = {"plan"}
"""Read by the status page alone."""
ROUNDS = 300


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One run."""

    mode: str
    answers: bool
    """Whether the ranker is asked and answers later; else it works in portions."""
    hopeless: bool = False
    """Whether no sample gets a reward."""

    def __str__(self) -> str:
        return f"{self.mode}-{'answers' if self.answers else 'portions'}{'-hopeless' * self.hopeless}"

    def world(self, fault: Fault, folder: Path) -> ShellWorld:
        job = settings(**{"max_turns": 2, "draws_per_step": 2, "steps": 8, **MODES[self.mode]})
        return ShellWorld(job, answers=self.answers, fault=fault, folder=folder, hopeless=self.hopeless)


SCENARIOS = [Scenario(mode=mode, answers=answers) for mode in MODES for answers in (False, True)]
HOPELESS = Scenario(mode="StreamAsync", answers=False, hopeless=True)


def troubles(world: ShellWorld, chance: Random, *, number: int) -> None:
    """What happens to peers, one thing after the other."""
    names = sorted(name for name, one in world.generators.items() if one.connected and not one.leaving)
    match number % 9:
        case 0 if names:
            world.kill_generator(chance.choice(names))
        case 1 if names:
            world.leave_generator(names[0])
        case 2 | 6:
            for name in ("a", "b", "c"):
                if name not in world.generators:
                    world.join_generator(name)
        case 3 if names:
            world.now_s += 2 * world.job.lease_s
            world.do(world.core.generator_alive(names[0], now_s=world.now_s))
            world.do(world.core.tick(world.now_s))
        case 4 if world.trainer.connected:
            world.trainer.connected = False
            world.do(world.core.trainer_left())
        case 5 if not world.trainer.connected:
            world.join_trainer()
        case 7 if names:
            world.kill_generator(names[0])
            world.join_generator(names[0])
            new = world.generators[names[0]]
            while new.inbox:
                world.deliver_generator(new)
            if new.wanted is not None:
                world.stall_weights(new)
                world.fail_weights(new)
        case 8:
            world.do(world.core.sync_journal(fx.pb.SyncJournal(step=world.trainer.step)))


def drive(world: ShellWorld, *, seed: int) -> None:
    """Until the core is dead, or the run has ended."""
    chance = Random(seed)
    world.start_trainer()
    for name in ("a", "b"):
        world.join_generator(name)
    for number in range(ROUNDS):
        world.progress_some(chance, pace=0.8, finish=0.5)
        if world.can_checkpoint():
            world.write_checkpoint()
        if world.asked:
            world.answer_ranker()
        for name in sorted(world.generators):
            world.finish_leaving(name)
        if number % 2 and number < ROUNDS // 2:
            troubles(world, chance, number=number // 2)
        if world.dead:
            return
    if not world.hopeless:
        world.run_out()


def assert_deaf(world: ShellWorld) -> None:
    """Nothing is called, appended or sent any more, whatever still happens outside."""
    calls, appended = world.fault.counts.copy(), len(world.unsynced)
    sent = {name: len(one.inbox) for name, one in world.generators.items()}
    for name in sorted(world.generators):
        world.do(world.core.generator_left(name))
    world.do(world.core.trainer_left())
    world.do(world.core.tick(world.now_s + 1000.0))
    world.do(world.core.committed(10**6))
    assert world.fault.counts == calls
    assert len(world.unsynced) == appended
    assert {name: len(one.inbox) for name, one in world.generators.items()} == sent


def restart(world: ShellWorld, chance: Random) -> None:
    """The process is gone; the journal had written all that was appended, or a part. The cause is gone as well."""
    written = len(world.unsynced) if chance.random() < 0.5 else chance.randrange(len(world.unsynced) + 1)
    world.durable.extend(write.record for write in list(world.unsynced)[:written])
    world.fault.target, world.hopeless = "", False
    world.close()
    world.boot()
    if chance.random() < 0.5 or world.trainer is None:
        world.start_trainer()


def assert_told(world: ShellWorld) -> None:
    """A fault of our own, which says what was raised; an ending that had been decided before stays."""
    ending = world.ending.ending
    assert ending is not None
    if not (world.fault.after and world.fault.target in ("Finished", "Failed")):
        assert ending.exit_code == EXIT_FAULT
        assert InjectedError.__name__ in ending.line


async def assert_exact(world: ShellWorld, folder: Path) -> None:
    """What `journal check` says of a journal with these records."""
    await write_journal(folder / "journal.sqlite", world.durable)
    job = world.job
    rules = Rules(batch_groups=job.batch_groups, staleness=job.staleness, group_size=job.group_size)
    report = check(read_facts(folder), rules=rules)
    assert not report.violations
    assert (report.steps, report.ended) == (job.steps, True)


async def count(scenario: Scenario, folder: Path) -> Fault:
    """Calls of everything in a run without a fault."""
    fault = Fault()
    world = scenario.world(fault, folder)
    with closing(world):
        drive(world, seed=1)
    return fault


async def inject(scenario: Scenario, fault: Fault, folder: Path) -> None:
    """One run with a fault, and the run that goes on after it."""
    with closing(scenario.world(fault, folder)) as world:
        drive(world, seed=1)
        assert fault.fired
        assert_told(world)
        assert_deaf(world)
        restart(world, Random(fault.call))
        world.run_out()
        assert world.ending.ending == ProcessExit(exit_code=EXIT_DONE, finished_step=world.job.steps)
    await assert_exact(world, folder)


def moments(calls: int) -> list[int]:
    """First, middle and last."""
    return sorted({1, (calls + 1) // 2, calls})


def targets(scenario: Scenario) -> tuple[str, ...]:
    """What a run of this kind reaches."""
    if scenario.hopeless:
        return ("Failed",)
    other = set() if scenario.answers else {"prompts_ranked", "AskRanker"}
    return tuple(target for target in TARGETS if target not in {*other, *UNREACHED, "Failed"})


ALL = [(scenario, target) for scenario in [*SCENARIOS, HOPELESS] for target in targets(scenario)]


@pytest.mark.parametrize("scenario", [*SCENARIOS, HOPELESS], ids=str)
async def test_the_script_reaches_everything(scenario: Scenario, tmp_path: Path) -> None:
    assert set((await count(scenario, tmp_path)).counts) >= set(targets(scenario))


async def campaign(scenario: Scenario, target: str, folder: Path) -> int:
    """At the first, a middle and the last call, before and behind what it does; how many that were."""
    calls = (await count(scenario, folder / "count")).counts[target]
    runs = [Fault(target=target, call=call, after=after) for call in moments(calls) for after in (False, True)]
    for number, fault in enumerate(runs):
        await inject(scenario, fault, folder / str(number))
    return len(runs)


@pytest.mark.parametrize(("scenario", "target"), ALL[:: len(ALL) // 12], ids=str)
async def test_a_fault_loses_nothing_and_doubles_nothing(scenario: Scenario, target: str, tmp_path: Path) -> None:
    assert await campaign(scenario, target, tmp_path) >= 2


@pytest.mark.soak
@pytest.mark.parametrize(("scenario", "target"), ALL, ids=str)
async def test_the_whole_campaign(scenario: Scenario, target: str, tmp_path: Path) -> None:
    assert await campaign(scenario, target, tmp_path) >= 2
