"""Orders in the core: who takes what under length pools, when orders are made, speed as heartbeats tell it."""

from collections import deque
from dataclasses import replace

import pytest

from streamrl.proto import stream_pb2 as pb
from streamrl.spec.scheduling import SkewAware
from streamrl_workers.metrics.step_times import StepCounts, bucket_of
from streamrl_workers.scheduler.dispatch.order import IN_ORDER
from streamrl_workers.scheduler.evaluation import GROUP_BASE
from streamrl_workers.scheduler.generators import Fleet
from streamrl_workers.scheduler.lengths import prompt_key
from streamrl_workers.scheduler.model import GroupTable, Window
from streamrl_workers.scheduler.planning import Dispatcher, WaitingGroups
from support.core_events import Always
from support.core_world import World, settings
from support.known_lengths import KnownLengths, SureLengths


def ready(
    *,
    pools: dict[str, str],
    slots: int,
    loaded: tuple[str, ...] | None = None,
    lengths: KnownLengths | None = None,
    **changes,
) -> World:
    """Generators with weights, and nothing to do yet; `loaded`: those with weights, None for all."""
    job = settings(**{"evaluation_prompts": 0, "staleness": 0, "prompt_look_ahead": 64, **changes})
    run = World(job, slots=(slots,), lengths=KnownLengths() if lengths is None else lengths)
    asked, run.prompts = run.prompts, deque()
    run.start_trainer()
    for name, pool in pools.items():
        run.join_generator(name, pool=pool)
    while run.trainer.inbox:
        run.deliver_trainer()
    run.commit(100)
    while run.trainer.inbox:
        run.deliver_trainer()
    for name in pools if loaded is None else loaded:
        load(run, name)
    run.prompts = asked
    return run


def load(run: World, name: str) -> None:
    generator = run.generators[name]
    while generator.inbox:
        run.deliver_generator(generator)
    run.load_weights(generator)


def go(run: World) -> dict[str, list[int]]:
    """Plan what can be planned; the groups that each generator holds then."""
    while run.prompts:
        run.deliver_prompts()
    return held(run)


def held(run: World) -> dict[str, list[int]]:
    for generator in run.generators.values():
        while generator.inbox:
            run.deliver_generator(generator)
    return {
        name: sorted(request.group_id for request in generator.active.values())
        for name, generator in run.generators.items()
    }


def everything(run: World) -> list[int]:
    """Groups that any generator holds, once for each sample."""
    return [group for groups in held(run).values() for group in groups]


def longest(groups: int) -> list[int]:
    """Groups by predicted length, the longest first, as the world's prompts have it."""
    return sorted(range(groups), key=lambda group: (-(prompt_key(f"train {group % 5}") % 97), group))


def measure(run: World, names: list[str], *, steps_s: dict[int, float]) -> None:
    """Heartbeats of these generators, with so many seconds a step by batch."""
    for name in names:
        for active, step_s in steps_s.items():
            for beat in range(10):
                reading = {bucket_of(active): StepCounts(beat / step_s, active * beat / step_s, float(beat))}
                run.do(run.core.generator_alive(name, now_s=run.now_s, reading=reading))


PAIR = {"g0": "p", "g1": "p"}
STATIC = {"dispatch": "skewAware", "dispatch_options": SkewAware(), "batch_groups": 5}


def test_pools_keep_to_themselves_while_they_have_work():
    run = ready(pools=PAIR, slots=4, **STATIC)
    order = longest(5)
    found = go(run)
    assert found["g0"] == [order[0]] * 2  # the long pool: one group of two samples
    assert found["g1"] == sorted(order[1:3] * 2)  # the longest of the others
    view = run.core.view()
    assert (view.waiting_samples, view.fleet.free_slots, view.fleet.idle["no_prompts"]) == (4, 2, 1)


def test_who_holds_nothing_and_has_nothing_left_steals():
    run = ready(pools=PAIR, slots=4, **STATIC)
    order = longest(5)
    go(run)
    finish(run, "g0")
    assert held(run)["g0"] == [order[3]] * 2  # the next of the other pool
    assert held(run)["g1"] == sorted(order[1:3] * 2)


def finish(run: World, name: str) -> None:
    """All that a generator holds."""
    generator = run.generators[name]
    for lease in list(generator.active):
        run.make_token(generator, lease, finish="stop")


@pytest.mark.parametrize("gone", ["g0", "g1"])
def test_a_pool_whose_generator_dies_is_served_by_the_other(gone):
    run = ready(pools=PAIR, slots=4, **STATIC)
    go(run)
    other = {"g0": "g1", "g1": "g0"}[gone]
    run.kill_generator(gone)
    for _ in range(20):
        if not run.core.view().waiting_samples:
            break
        finish(run, other)
        held(run)
    assert not run.core.view().waiting_samples


def test_trust_makes_pools_and_its_loss_ends_them():
    run = ready(pools=PAIR, slots=4, **STATIC)
    run.lengths.trusted = False
    assert go(run)["g0"] == [0, 0, 2, 2]
    assert not run.core.order.reorders
    run.lengths.trusted = True
    run.do(run.core.tick(run.now_s))
    assert run.core.order.long_generators
    run.lengths.trusted = False
    run.do(run.core.tick(run.now_s))
    assert "not proved" in run.core.order.why


@pytest.mark.parametrize("dispatch", ["longestFirst", "skewAware", "auto"])
def test_without_trust_every_policy_issues_what_fifo_does(dispatch):
    issues = []
    for key in ("fifo", dispatch):
        run = ready(pools=PAIR, slots=2, dispatch=key, batch_groups=5)
        run.lengths.trusted = False
        go(run)
        seen = []
        for _ in range(40):
            for generator in run.generators.values():
                seen += [(generator.name, r.group_id, r.sample_index) for r in generator.active.values()]
            run.progress_some(Always(), pace=1.0, finish=1.0)
        assert any(group_id < GROUP_BASE for _, group_id, _ in seen)
        issues.append(seen)
    assert issues[0] == issues[1]


def test_the_faster_generator_takes_the_sample():
    run = ready(pools={"g0": "slow", "g1": "fast"}, slots=4, group_size=1, batch_groups=5, dispatch="fifo")
    for name, step_s in {"g0": 0.040, "g1": 0.010}.items():
        measure(run, [name], steps_s={1: step_s})
    assert go(run) == {"g0": [4], "g1": [0, 1, 2, 3]}


def test_without_heartbeats_the_load_is_even():
    run = ready(pools={"g0": "slow", "g1": "fast"}, slots=4, group_size=1, batch_groups=4, dispatch="fifo")
    assert go(run) == {"g0": [0, 2], "g1": [1, 3]}


class Counting:
    """Counts the orders that are asked for."""

    def __init__(self) -> None:
        self.orders = 0

    def order(self, batch):
        self.orders += 1
        return IN_ORDER


def test_many_generators_that_join_do_not_cost_as_many_orders():
    groups = GroupTable(Window(batch_groups=5, staleness=0, step=0))
    fleet, policy = Fleet(first_lease=1), Counting()
    waiting = WaitingGroups(groups, order=IN_ORDER, lengths=KnownLengths(), batch_groups=5)
    dispatcher = Dispatcher(
        policy, waiting=waiting, fleet=fleet, groups=groups, group_size=2, overlaps=False, lengths=KnownLengths()
    )
    orders = []
    for number in range(200):
        info = pb.GeneratorHello(generator_id=f"g{number}", instance="1", pool="p", slots=4)
        generator = fleet.join(info, now_s=0.0)
        dispatcher.refresh()
        dispatcher.refresh()
        orders.append(policy.orders)
    assert orders[14] == 15, "few generators: an order for each"
    assert orders[-1] < 60
    before = policy.orders
    for _ in range(20):  # one that comes and goes
        generator.leaving = not generator.leaving
        fleet.settle(generator)
        fleet.settle(generator)
        dispatcher.refresh()
    assert before < policy.orders <= before + 2


class TwoSignals(SureLengths):
    """Two signals that predict opposite orders."""

    def predict(self, key, *, siblings=()):
        found = super().predict(key, siblings=siblings)
        return found if "History" in self.trusted_signals else replace(found, tokens=97 - found.tokens)


def test_what_waits_is_predicted_by_the_signal_that_is_trusted_now():
    run = ready(pools=PAIR, slots=1, lengths=TwoSignals(), dispatch="longestFirst", batch_groups=5)
    go(run)
    first = [run.core.order.reorders, *sorted(everything(run))]
    assert first == [True, *sorted(longest(5)[:1] * 2)]
    run.lengths.trusted_signals = frozenset({"Ranker"})
    run.do(run.core.tick(run.now_s))
    for generator in run.generators.values():
        run.make_token(generator, next(iter(generator.active)), finish="stop")
    assert set(everything(run)) == {longest(5)[-1]}
