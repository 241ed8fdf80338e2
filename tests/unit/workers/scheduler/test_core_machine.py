"""The core under arbitrary orders of events: staleness, exactly once, no deadlock.

Random lengths, deaths, joins and leaves of generators, lagging and failing weights, failing rewards, lost links,
trainers that go back to a checkpoint, schedulers that restart from what was durable; every dispatch policy, with
length predictions that win and lose trust, running samples that move. `World` checks each
step as the trainer takes it; at the end of every example the run is driven to its end with everybody alive.
"""

from collections.abc import Mapping
from random import Random
from types import MappingProxyType
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, seed
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from streamrl.spec.scheduling import Rebalance, SkewAware
from streamrl_workers.scheduler import planning
from streamrl_workers.scheduler.extensions import rebalancing
from streamrl_workers.scheduler.extensions.rebalancing import Move
from streamrl_workers.scheduler.generators import Fleet
from streamrl_workers.scheduler.records import Evaluated, StepTaken
from support.core_world import World, settings
from support.known_lengths import KnownLengths

NAMES = ("a", "b", "c")
DISPATCHES = {
    "fifo": None,
    "longestFirst": None,
    "skewAware": SkewAware(),
    "auto": None,
}
STEPS = 60
EXAMPLES = hypothesis_settings(
    max_examples=40,
    stateful_step_count=STEPS,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
FAILURES, LOSSES = 10, STEPS + 1
"""Failed samples allowed in one example, and losses that a sample stands: more in a row would end the run, as they should."""


class CoreMachine(RuleBasedStateMachine):
    """One run; subclasses fix what the job demands."""

    staleness = 1
    demands: ClassVar[dict[str, Any]] = {}
    least_slots = 0
    clusters: ClassVar[dict[str, str]] = {}
    pools: ClassVar[dict[str, str]] = {}

    @initialize(
        dispatch=st.sampled_from(sorted(DISPATCHES)),
        known=st.booleans(),
        buffer_bytes=st.sampled_from([1, 600, 1 << 20, 1 << 20]),
        slots=st.sampled_from([(1, 2), (3, 2), (8, 6), (12, 12)]),
        evaluation=st.sampled_from([{}, {"evaluation_prompts": 1, "evaluation_sampled": 1}]),
        kv=st.sampled_from([None, None, 1, 24]),
    )
    def begin(
        self,
        dispatch: str,
        known: bool,
        buffer_bytes: int,
        slots: tuple[int, int],
        evaluation: dict[str, int],
        kv: int | None,
    ) -> None:
        job = settings(
            staleness=self.staleness,
            steps=6,
            dispatch=dispatch,
            dispatch_options=DISPATCHES[dispatch],
            max_buffer_bytes=buffer_bytes,
            max_issues=LOSSES,
            **(evaluation | self.demands),
        )
        slots = tuple(max(count, self.least_slots) for count in slots)
        self.world = World(job, slots=slots, lengths=KnownLengths() if known else None)
        self.world.kv = kv
        self.world.clusters, self.world.pools = self.clusters, self.pools
        self.failures = 0
        self.world.start_trainer()
        self.world.join_generator("a")
        self.world.join_generator("b")

    # ---- the run goes on

    @rule(rounds=st.integers(1, 6))
    def everything(self, rounds: int) -> None:
        for _ in range(rounds):
            self.world.progress_once()

    @rule(seed=st.integers(0, 2**32), rounds=st.integers(1, 40), pace=st.floats(0.2, 1), finish=st.floats(0.05, 1))
    def unevenly(self, seed: int, rounds: int, pace: float, finish: float) -> None:
        chance = Random(seed)
        for _ in range(rounds):
            self.world.progress_some(chance, pace=pace, finish=finish)

    @precondition(lambda self: self.world.prompts)
    @rule()
    def prompts(self) -> None:
        self.world.deliver_prompts()

    @precondition(lambda self: self.world.unsynced)
    @rule(count=st.integers(1, 5))
    def commit(self, count: int) -> None:
        self.world.commit(count)

    @precondition(lambda self: self.world.scores)
    @rule(fail=st.booleans())
    def score(self, fail: bool) -> None:
        fail = fail and self.failures < FAILURES
        self.failures += fail
        self.world.score(fail=fail)

    @precondition(lambda self: self.world.turns)
    @rule(
        done=st.booleans(),
        fail=st.booleans(),
        late=st.booleans(),
        observation=st.sampled_from(["", "o", "ooo"]),
        context=st.booleans(),
    )
    def turn(self, done: bool, fail: bool, late: bool, observation: str, context: bool) -> None:
        fail = fail and self.failures < FAILURES
        self.failures += fail
        error = "it hung" if fail else ""
        self.world.answer_turn(done=done, error=error, late=late, observation=observation, context=context)

    # ---- generators

    @rule(name=st.sampled_from(NAMES))
    def join(self, name: str) -> None:
        self.world.join_generator(name)

    @precondition(lambda self: self.world.generators)
    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        self.world.kill_generator(data.draw(st.sampled_from(sorted(self.world.generators))))

    @precondition(lambda self: any(g.connected and not g.leaving for g in self.world.generators.values()))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        staying = sorted(name for name, g in self.world.generators.items() if g.connected and not g.leaving)
        self.world.leave_generator(data.draw(st.sampled_from(staying)))

    @precondition(lambda self: any(g.leaving for g in self.world.generators.values()))
    @rule()
    def go(self) -> None:
        """Whoever leaves and holds nothing goes."""
        for name in sorted(self.world.generators):
            self.world.finish_leaving(name)

    @precondition(lambda self: self.world.generators)
    @rule(data=st.data())
    def silence(self, data: st.DataObject) -> None:
        """One generator is not heard for longer than a lease, then speaks again."""
        silent = data.draw(st.sampled_from(sorted(self.world.generators)))
        world = self.world
        world.now_s += world.job.lease_s * 0.6
        for _ in range(2):
            for name in sorted(world.generators):
                if name != silent:
                    world.do(world.core.generator_alive(name, now_s=world.now_s))
            world.now_s += world.job.lease_s * 0.6
            world.do(world.core.tick(world.now_s))
        world.do(world.core.generator_alive(silent, now_s=world.now_s))

    @precondition(lambda self: any(g.inbox for g in self.world.generators.values()))
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        names = sorted(name for name, g in self.world.generators.items() if g.inbox and g.connected)
        if names:
            self.world.deliver_generator(self.world.generators[data.draw(st.sampled_from(names))])

    @precondition(lambda self: self.computing())
    @rule(data=st.data(), finish=st.sampled_from(["", "", "stop", "stop", "length", "error"]))
    def token(self, data: st.DataObject, finish: str) -> None:
        generator = self.world.generators[data.draw(st.sampled_from(self.computing()))]
        if finish == "error":
            finish = finish if self.failures < FAILURES else "stop"
            self.failures += finish == "error"
        self.world.make_token(generator, data.draw(st.sampled_from(sorted(generator.active))), finish=finish)

    def computing(self) -> list[str]:
        generators = self.world.generators.items()
        return sorted(name for name, g in generators if g.active and g.connected and not g.paused)

    @precondition(lambda self: any(self.loadable()))
    @rule(data=st.data())
    def weights(self, data: st.DataObject) -> None:
        happens = data.draw(
            st.sampled_from([self.world.load_weights, self.world.fail_weights, self.world.stall_weights])
        )
        happens(self.world.generators[data.draw(st.sampled_from(self.loadable()))])

    def loadable(self) -> list[str]:
        return sorted(
            name
            for name, g in self.world.generators.items()
            if g.connected and g.wanted is not None and not any(request.pinned for request in g.active.values())
        )

    # ---- the trainer

    @precondition(lambda self: self.world.trainer.connected and self.world.trainer.inbox)
    @rule()
    def deliver_trainer(self) -> None:
        self.world.deliver_trainer()

    @precondition(lambda self: self.world.trainer.connected and self.world.trainer.owed)
    @rule()
    def pay(self) -> None:
        self.world.pay()

    @precondition(lambda self: self.world.can_take_step())
    @rule()
    def step(self) -> None:
        self.world.take_step()

    @precondition(lambda self: self.world.can_wait())
    @rule()
    def wait(self) -> None:
        self.world.say_it_waits()

    @precondition(lambda self: self.world.can_checkpoint())
    @rule(said=st.booleans())
    def checkpoint(self, said: bool) -> None:
        if said:
            self.world.write_checkpoint()
        else:
            self.world.checkpoint = self.world.trainer.step  # on disk, but it dies before it can say so
            self.world.start_trainer()

    @rule()
    def lose_trainer_link(self) -> None:
        self.world.trainer.connected = False
        self.world.do(self.world.core.trainer_left())

    @precondition(lambda self: not self.world.trainer.connected)
    @rule()
    def rejoin_trainer(self) -> None:
        self.world.join_trainer()

    @rule(credit=st.sampled_from([1, 300, 1_000_000]))
    def restart_trainer(self, credit: int) -> None:
        self.world.start_trainer(credit=credit)

    # ---- the scheduler

    @precondition(lambda self: self.world.lengths is not None)
    @rule(sure=st.booleans())
    def trust(self, sure: bool) -> None:
        """Predictions win or lose trust; the next event finds it so."""
        self.world.lengths.trusted = sure

    @rule(trainer_too=st.booleans())
    def crash(self, trainer_too: bool) -> None:
        self.world.boot()
        if trainer_too:
            self.world.start_trainer()

    # ---- what always holds

    @invariant()
    def the_buffer_is_what_has_arrived(self) -> None:
        if not hasattr(self, "world"):
            return
        groups = list(self.world.core._groups)
        running = sum(sample.size_bytes for group in groups for sample in group.samples)
        scored = sum(len(data) for group in groups if group.result is not None for data in group.result.samples)
        assert self.world.core.view().buffered_bytes == running + scored

    @invariant()
    def evaluated_once(self) -> None:
        if hasattr(self, "world"):
            evaluated = [record.step for record in self.world.durable if isinstance(record, Evaluated)]
            assert len(evaluated) == len(set(evaluated))
            assert not self.world.failed

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.run_out()
        assert world.core.view().step == world.job.steps
        taken = {record.step: record.group_ids for record in world.durable if isinstance(record, StepTaken)}
        assert sorted(taken) == list(range(world.job.steps))
        groups = [group_id for group_ids in taken.values() for group_id in group_ids]
        assert len(groups) == len(set(groups)) == world.job.steps * world.job.batch_groups


def machine(
    staleness: int,
    *,
    clusters: Mapping[str, str] = MappingProxyType({}),
    pools: Mapping[str, str] = MappingProxyType({}),
    **demands: Any,
) -> type[RuleBasedStateMachine]:
    """The machine for one S, and what else the job demands, as a test case."""
    name = "_".join([f"Staleness{staleness}", *(f"{key}_{value}" for key, value in demands.items())])
    given = {"staleness": staleness, "demands": demands, "clusters": dict(clusters), "pools": dict(pools)}
    found = type(name, (CoreMachine,), given)
    found.TestCase.settings = EXAMPLES
    return found.TestCase


LENT = {"b": "lent", "c": "lent"}
"""Pools of two of the generators; "a" has devices of its own."""

TestStaleness0 = machine(0)
TestStaleness1 = machine(1)
TestStaleness2 = machine(2)
TestStaleness4 = machine(4)
TestTurns = machine(1, max_turns=3)
TestTurnsWithoutStaleness = machine(0, max_turns=2)
TestResampledTurns = machine(1, max_turns=3, resampled_percent=50)
TestResampledTurnsInOrder = machine(0, max_turns=2, resampled_percent=70, by_number=True, partial_rollouts=False)
TestColocated = machine(0, whole_batches=True, colocated=True, shared_pools=frozenset({"p"}))
TestLending = machine(1, pools=LENT, shared_pools=frozenset({"lent"}))
TestLendingWithoutStaleness = machine(0, pools=LENT, shared_pools=frozenset({"lent"}))
TestLendingOfWholeBatches = machine(1, pools=LENT, shared_pools=frozenset({"lent"}), whole_batches=True)
TestLendingOfTurns = machine(2, pools=LENT, shared_pools=frozenset({"lent"}), max_turns=3)
TestLendingInOrder = machine(0, pools=LENT, shared_pools=frozenset({"lent"}), by_number=True, partial_rollouts=False)
TestLendingOfSamplesOfOneVersion = machine(2, pools=LENT, shared_pools=frozenset({"lent"}), partial_rollouts=False)
TestBatch = machine(0, whole_batches=True)
TestBatchOfStaleness1 = machine(1, whole_batches=True)
TestBatchOfStaleness3 = machine(3, whole_batches=True)
TestSamplesOfOneVersion = machine(1, partial_rollouts=False)
TestSamplesOfOneVersionWithTurns = machine(2, partial_rollouts=False, max_turns=2)
TestInOrder = machine(0, by_number=True, partial_rollouts=False)
TestWholeBatchesInOrder = machine(0, by_number=True, partial_rollouts=False, whole_batches=True)
TestClustersInTurn = machine(1, clusters={"a": "east", "c": "west"}, shares_uplink=True)
TestClustersInTurnWithoutStaleness = machine(0, clusters={"a": "east", "b": "east", "c": "west"}, shares_uplink=True)
FROZEN: dict[str, Any] = {"pools": {"b": "f", "c": "f"}, "reference_pool": "f"}
TestFrozen = machine(1, **FROZEN)
TestFrozenWithoutStaleness = machine(0, **FROZEN)
TestFrozenWithTurns = machine(2, max_turns=3, **FROZEN)
TestFrozenSamplesOfOneVersion = machine(1, partial_rollouts=False, **FROZEN)
TestFrozenInOrder = machine(0, by_number=True, partial_rollouts=False, **FROZEN)
TestFrozenDynamicSampling = machine(1, draws_per_step=3, whole_batches=True, **FROZEN)
TestFrozenResampledTurns = machine(1, max_turns=3, resampled_percent=50, **FROZEN)
TestDynamicSampling = machine(1, draws_per_step=3)
TestDynamicSamplingWithoutStaleness = machine(0, draws_per_step=2)
TestSupervised = machine(0, supervised=True, group_size=1)
TestSupervisedInOrder = machine(0, supervised=True, group_size=1, by_number=True, partial_rollouts=False)
TestSupervisedWithoutGenerators = machine(0, supervised=True, group_size=1, evaluates=False)
TestDynamicSamplingOfWholeBatches = machine(2, draws_per_step=2, whole_batches=True)


def test_an_order_for_generators_that_are_gone_strands_nobody(monkeypatch):
    monkeypatch.setattr(planning, "FLEET_SHARE", 1)  # all of the generators must change before there is a new order
    run_state_machine_as_test(CoreMachine, settings=EXAMPLES)


MOST_ROUNDS = 16
"""With S of 1 and more something nearly always waits, and then nothing moves: examples are drawn until it did."""


@pytest.mark.parametrize(
    ("staleness", "demands"),
    [
        (0, {}),
        (1, {}),
        (2, {"whole_batches": True}),
        (1, {"max_turns": 3}),
        (2, {"draws_per_step": 3}),
        (0, {"partial_rollouts": False}),
    ],
    ids=str,
)
def test_samples_that_move_at_every_chance(staleness, demands, monkeypatch):
    """Whether it pays or not: all that may move moves, as soon as nothing waits."""
    moved = []

    def all_of_them(source, target, *, movable, gain):
        leases = tuple(running.lease for running in movable[: target.slots - len(target.running)])
        moved.append(len(leases))
        return Move(target=target.generator_id, leases=leases, before_s=1.0, after_s=0.0) if leases else None

    monkeypatch.setattr(rebalancing, "best_move", all_of_them)
    monkeypatch.setattr(rebalancing, "LOOK_INTERVAL_S", 0.0)
    monkeypatch.setattr(rebalancing, "COMPLETIONS_WINDOW", 0)  # completions that must be known
    monkeypatch.setattr(Fleet, "measured", lambda self, generator: True)
    often = {"rebalance": Rebalance.model_validate({"maxMoves": 5}), "evaluation_prompts": 0}
    fixed = {"staleness": staleness, "demands": {**demands, **often}, "least_slots": 12}  # something is free
    kind = type("Moving", (CoreMachine,), fixed)
    for number in range(MOST_ROUNDS):  # numbered: CI's profile would draw the same in every round
        run_state_machine_as_test(seed(number)(kind), settings=EXAMPLES)
        if sum(moved):
            return
    raise AssertionError("nothing has moved: these examples say nothing")
