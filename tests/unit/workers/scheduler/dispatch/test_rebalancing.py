"""Moves in the core: when they happen, what they do to leases and tokens, and when nothing moves."""

from collections.abc import Collection

import pytest

from streamrl.proto import stream_pb2 as pb
from streamrl.spec.scheduling import Rebalance
from streamrl_workers.metrics.step_times import StepCounts, bucket_of
from streamrl_workers.scheduler import records as rec
from streamrl_workers.scheduler.dispatch.speeds import MIN_STEPS
from streamrl_workers.scheduler.extensions.rebalancing import MIN_COMPLETIONS, Rebalancer
from support.core_peers import SimGenerator
from support.core_world import World, settings
from support.known_lengths import KnownLengths
from support.turns import next_token

GROUPS, SAMPLES, SLOTS = 4, 8, 40
LONGEST = 60
"""Tokens; the lengths of a batch are spread evenly up to it."""


def started(*, measured: bool = True, steps_done: int = 2, names: tuple[str, ...] = ("g0", "g1"), **changes) -> World:
    """A run that has done some steps on all generators, so that lengths are known; then all but g0 die and come back empty."""
    values = {
        "batch_groups": GROUPS,
        "group_size": SAMPLES,
        "staleness": 0,
        "steps": 9,
        "evaluation_prompts": 0,
        "prompt_look_ahead": 64,
        "dispatch": "fifo",
        "sampling": pb.Sampling(temperature=1.0, top_p=1.0, max_tokens=LONGEST),
        "rebalance": Rebalance(),
    }
    run = World(settings(**{**values, **changes}), slots=(SLOTS,), lengths=KnownLengths())
    run.lengths.trusted = changes.get("dispatch") == "skewAware"
    run.start_trainer()
    for name in names:
        run.join_generator(name)
    if measured:
        for batch, step_s in {4: 0.5, 36: 4.0}.items():
            feed(run, "g0", batch=batch, step_s=step_s)
    for _ in range(steps_done):
        quiet(run)
        for place, (generator, lease) in enumerate(out(run)):
            give(run, generator, lease, tokens=1 + place * LONGEST // 32, finish="stop")
    quiet(run)
    for name in names[1:]:
        run.kill_generator(name)
    quiet(run)
    for name in names[1:]:
        run.join_generator(name)
    quiet(run)
    assert [len(run.generators[name].active) for name in names] == [GROUPS * SAMPLES] + [0] * (len(names) - 1)
    return run


def quiet(run: World, *, loading: Collection[str] = ()) -> None:
    """Everything is delivered and scored; no tokens are made. `loading`: generators that do not finish to load weights."""
    while True:
        before = len(run.durable), run.core.view().active_leases
        while run.prompts:
            run.deliver_prompts()
        run.commit(100)
        while run.scores:
            run.score(fail=False)
        for generator in run.generators.values():
            while generator.inbox:
                run.deliver_generator(generator)
            if generator.wanted is not None and generator.name not in loading:
                run.load_weights(generator)
        while run.trainer.inbox:
            run.deliver_trainer()
        if run.trainer.owed:
            run.pay()
        if run.can_take_step():
            run.take_step()
        settled = not (run.prompts or run.unsynced or run.scores or run.trainer.inbox)
        if settled and before == (len(run.durable), run.core.view().active_leases):
            return


def out(run: World) -> list[tuple[SimGenerator, int]]:
    return [(generator, lease) for generator in run.generators.values() for lease in sorted(generator.active)]


def feed(run: World, name: str, *, batch: int, step_s: float) -> None:
    """Heartbeats of a generator that has so many active and is so fast."""
    for steps in (0, MIN_STEPS):
        reading = {bucket_of(batch): StepCounts(steps, batch * steps, steps * step_s)}
        run.do(run.core.generator_alive(name, now_s=run.now_s, reading=reading))


def give(run: World, generator: SimGenerator, lease: int, *, tokens: int, finish: str = "") -> None:
    """So many tokens for one sample, in one message."""
    request = generator.active[lease]
    each = [
        next_token(request, version=generator.version, finish=finish if left == 0 else "")
        for left in reversed(range(tokens))
    ]
    attempt, step = generator.version
    item = pb.Progress(
        lease=lease,
        tokens=b"".join(one.tokens for one in each),
        logprobs=b"".join(one.logprobs for one in each),
        spans=[pb.VersionSpan(tokens=tokens, step=step, attempt=attempt)],
        prompt_tokens=each[0].prompt_tokens,
        finish_reason=finish,
        text=each[-1].text,
    )
    if finish:
        del generator.active[lease]
    run.do(run.core.generator_progress(generator.name, items=[item], now_s=run.now_s))


def begin(run: World, *, tokens: int = 2) -> None:
    """All that is out has its first tokens; a little later something happens."""
    for generator, lease in out(run):
        give(run, generator, lease, tokens=tokens)
    wait(run)


def wait(run: World, seconds: float = 2.5) -> None:
    run.now_s += seconds
    run.do(run.core.tick(run.now_s))


def moved(run: World) -> int:
    return run.core.view().moved_samples


def test_samples_go_on_with_their_tokens_at_the_empty_generator_and_are_taken_from_the_full_one():
    run = started()
    before = {(r.group_id, r.sample_index): lease for lease, r in run.generators["g0"].active.items()}
    reissued = run.core.view().reissued_samples
    begin(run)
    quiet(run)
    full, empty = run.generators["g0"].active, run.generators["g1"].active
    assert len(empty) == moved(run) > 0
    assert len(full) + len(empty) == run.core.view().active_leases == GROUPS * SAMPLES
    for lease, request in empty.items():
        assert len(request.prefix_tokens) == 4 * 2
        assert lease not in before.values()
        assert before[request.group_id, request.sample_index] not in full
    assert run.core.view().reissued_samples == reissued, "a move is no loss"


def test_what_the_old_generator_still_says_is_ignored():
    run = started()
    full = run.generators["g0"]
    begin(run)
    (cancel,) = [command.cancel for command in full.inbox if command.HasField("cancel")]
    ignored = run.core.view().ignored_progress
    for lease in cancel.leases:  # it has not heard of it yet
        give(run, full, lease, tokens=3, finish="stop")
    assert run.core.view().ignored_progress == ignored + moved(run)
    assert not run.scores


def test_the_next_decision_waits_for_the_first_token_of_the_one_before():
    run = started(names=("g0", "g1", "g2"))
    begin(run)
    quiet(run)
    first = moved(run)
    empty = [generator for generator in run.generators.values() if not generator.active]
    assert len(empty) == 1
    for _ in range(2):
        wait(run)
    assert moved(run) == first
    for generator, lease in out(run):
        give(run, generator, lease, tokens=1)
    wait(run)
    quiet(run)
    assert moved(run) > first
    assert empty[0].active


def test_a_sample_moves_only_so_often():
    run = started(rebalance=Rebalance.model_validate({"maxMoves": 1}), steps_done=2)
    begin(run)
    quiet(run)
    taken = {(r.group_id, r.sample_index) for r in run.generators["g1"].active.values()}
    assert taken
    for generator, lease in [pair for pair in out(run) if pair[0].name == "g0"]:
        give(run, generator, lease, tokens=1, finish="stop")  # now g1 is the full one
    for _ in range(3):
        for generator, lease in out(run):
            give(run, generator, lease, tokens=1)
        wait(run)
    quiet(run)
    assert {(r.group_id, r.sample_index) for r in run.generators["g1"].active.values()} == taken


@pytest.mark.parametrize(
    ("why", "changes"),
    [
        ("it is not wanted", {"rebalance": None}),
        ("the gain is too small", {"rebalance": Rebalance.model_validate({"gainPercent": 50})}),
        ("no speed is measured", {"measured": False}),
        ("too few completions are known", {"steps_done": 1}),
        ("the other one is of the other side", {"dispatch": "skewAware"}),
    ],
)
def test_nothing_moves_when(why, changes):
    run = started(**changes)
    assert why == "too few completions are known" or GROUPS * SAMPLES * 2 >= MIN_COMPLETIONS
    begin(run)
    for _ in range(3):
        wait(run)
    assert moved(run) == 0
    assert not run.generators["g1"].active


def test_nothing_moves_before_its_first_token_nor_while_something_waits():
    run = started()
    wait(run)
    assert moved(run) == 0
    run.kill_generator("g1")
    run.kill_generator("g0")
    run.join_generator("g1")
    run.generators["g1"].slots = 4
    assert run.core.view().waiting_samples
    for _ in range(3):
        wait(run)
    assert moved(run) == 0


def test_a_generator_at_a_version_that_the_group_may_not_go_on_with_takes_nothing():
    run = started()
    run.kill_generator("g1")
    run.generators["g1"] = SimGenerator("g1", "late", SLOTS, version=(1, 0))
    run.join_generator("g1")
    begin(run)
    assert moved(run) == 0
    quiet(run)  # it loads the newest
    wait(run)
    assert moved(run) > 0


@pytest.mark.parametrize("late", ["g1", "g2"])
def test_samples_move_to_who_has_the_version_while_another_still_loads_it(late: str):
    run = started(names=("g0", "g1", "g2"))
    run.kill_generator(late)
    run.generators[late] = SimGenerator(late, "late", SLOTS, version=(1, 0))
    run.join_generator(late)
    quiet(run, loading={late})
    assert run.generators[late].wanted is not None, "it still loads"
    begin(run)
    quiet(run, loading={late})
    ready = run.generators["g2" if late == "g1" else "g1"]
    assert len(ready.active) == moved(run) > 0
    assert not run.generators[late].active
    quiet(run)  # it has the version now
    for _ in range(2):
        for generator, lease in out(run):
            give(run, generator, lease, tokens=1)
        wait(run)
        quiet(run)
    assert run.generators[late].active


def test_where_the_best_offer_saves_too_little_the_one_of_the_next_version_is_asked():
    """g1 has one slot and an older version with which groups may still go on; g2 has all of its slots and the newest."""
    run = started(names=("g0", "g1", "g2"), steps=8, staleness=1, batch_groups=GROUPS // 2)
    run.kill_generator("g1")
    attempt, step = run.generators["g0"].version
    run.generators["g1"] = SimGenerator("g1", "late", 1, version=(attempt, step - 1))
    run.join_generator("g1")
    begin(run)
    quiet(run, loading={"g1"})
    assert len(run.generators["g2"].active) == moved(run) > 1
    assert not run.generators["g1"].active


@pytest.mark.parametrize("late", ["g0", "g1", "g2"])
def test_a_run_in_which_one_is_always_a_version_behind_moves_and_ends_exactly(late: str):
    """What it holds goes on, by itself or elsewhere; no sample is older than it may be, and each is in one step."""
    run = started(names=("g0", "g1", "g2"), steps=8, staleness=1, batch_groups=GROUPS // 2)
    behind = 0
    for turn in range(300):
        if run.finished:
            break
        quiet(run, loading={late} if turn % 4 else ())
        behind += run.generators[late].wanted is not None
        for generator, lease in out(run):
            give(run, generator, lease, tokens=3, finish="stop" if (lease + turn) % 5 == 0 else "")
        wait(run)
        if run.trainer.step == run.job.steps and run.can_checkpoint():
            run.write_checkpoint()
    assert run.finished
    assert min(behind, moved(run)) > 0
    assert max(run.staleness_seen) <= 1
    taken = [group for r in run.durable if isinstance(r, rec.StepTaken) for group in r.group_ids]
    assert len(taken) == len(set(taken)) == 8 * GROUPS // 2


def test_the_run_ends_with_every_group_in_one_step():
    run = started(steps=6)
    begin(run)
    assert moved(run) > 0
    for turn in range(200):
        if run.finished:
            break
        quiet(run)
        for generator, lease in out(run):
            give(run, generator, lease, tokens=5, finish="stop" if (lease + turn) % 3 else "")
        wait(run)
        if run.trainer.step == run.job.steps and run.can_checkpoint():
            run.write_checkpoint()
    assert run.finished
    taken = [group for r in run.durable if isinstance(r, rec.StepTaken) for group in r.group_ids]
    assert len(taken) == len(set(taken)) == 6 * GROUPS


def test_with_many_generators_a_look_compares_two_of_them(monkeypatch):
    names = tuple(f"g{number}" for number in range(9))
    run = started(names=names)
    seen: list[str] = []
    see = Rebalancer._host
    monkeypatch.setattr(Rebalancer, "_host", lambda self, one: (seen.append(one.generator_id), see(self, one))[1])
    begin(run)
    assert seen[0] == "g0", "the full one"
    assert len(set(seen)) == 2 < len(names)
