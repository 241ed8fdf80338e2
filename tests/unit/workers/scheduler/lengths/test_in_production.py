"""What the core tells the length signals: each group that is made is predicted once and learnt once."""

from random import Random

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from streamrl_workers.scheduler import effects as fx
from streamrl_workers.scheduler import records as rec
from streamrl_workers.scheduler.lengths import LengthHistory, Lengths, prompt_key
from support.core_world import World, settings
from support.replayed import replay


class WithRanker(World):
    """A world that remembers what the ranker is asked and taught; it never answers."""

    def __init__(self, **changes: int) -> None:
        self.asked: list[str] = []
        self.taught: list[tuple[str, float]] = []
        lengths = Lengths(LengthHistory(), signals=("History", "Ranker"))
        super().__init__(settings(evaluation_prompts=0, **changes), lengths=lengths)

    def take(self, effect: fx.Effect) -> None:
        if isinstance(effect, fx.AskRanker):
            self.asked += [prompt for _, prompt in effect.prompts]
            self.taught += effect.pairs
        super().take(effect)


def scored(world: World) -> list[rec.Scored]:
    return [record for record in world.durable if isinstance(record, rec.Scored)]


def test_every_group_is_predicted_and_learnt_once() -> None:
    world = WithRanker()
    world.run_out()
    assert len(world.taught) == len(scored(world)) == 12
    assert world.lengths.predictions.total() == 12
    assert all(tokens == 1.0 for _, tokens in world.taught), "each sample of this world has one token"
    keys = {record.prompt_key for record in world.durable if isinstance(record, rec.Planned)}
    assert {prompt_key(prompt) for prompt, _ in world.taught} <= keys <= {prompt_key(prompt) for prompt in world.asked}


def test_groups_with_equal_rewards_are_learnt_too_and_failed_ones_are_not() -> None:
    world = WithRanker(draws_per_step=2)
    world.reward = lambda group_id, sample_index: float(sample_index if group_id % 2 else 0)
    world.run_out()
    dropped = [
        record for record in world.durable if isinstance(record, rec.Dropped) and record.reason == "zero_variance"
    ]
    assert dropped
    assert len(world.taught) == len(scored(world)) + len(dropped)


@given(seed=st.integers(0, 2**32))
@hypothesis_settings(max_examples=20, deadline=None)
def test_a_restart_finds_the_past_of_dropped_groups_too(seed: int) -> None:
    history, chance = LengthHistory(), Random(seed)
    lengths = Lengths(history, signals=("History",))
    world = World(settings(evaluation_prompts=0, draws_per_step=3), lengths=lengths)
    world.reward = lambda group_id, sample_index: float(sample_index if group_id % 2 else 0)
    world.start_trainer()
    world.join_generator("a")
    for _ in range(chance.randrange(400)):
        world.progress_some(chance, pace=0.5, finish=0.2)
    while world.unsynced:
        world.commit(len(world.unsynced))
    assert replay(world.durable).prompt_lengths == history.means()
    world.run_out()
    assert any(record.mean_tokens for record in world.durable if isinstance(record, rec.Dropped))
    assert replay(world.durable).prompt_lengths == history.means()


def test_a_lost_group_is_predicted_once() -> None:
    world = WithRanker()
    world.start_trainer()
    world.join_generator("a")
    for _ in range(3):
        world.progress_once()
    begun = world.lengths.predictions.total()
    assert begun > 0
    world.kill_generator("a")
    world.run_out()
    assert world.lengths.predictions.total() == 12
