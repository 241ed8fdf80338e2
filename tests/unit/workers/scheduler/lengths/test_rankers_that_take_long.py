"""Rankers that take long: what they are asked, when what they answer counts, and that no portion of their work is long."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl_workers.scheduler import effects as fx
from streamrl_workers.scheduler.lengths import LengthHistory, Lengths, prompt_key
from streamrl_workers.scheduler.lengths.rankers import AnsweredRanker, DeferredRanker, HashingRanker
from streamrl_workers.scheduler.lengths.rankers import deferred as deferred_module
from streamrl_workers.scheduler.lengths.rankers.deferred import PORTION_CHARS
from streamrl_workers.scheduler.settings import MAX_LOOK_AHEAD
from support.core_world import World
from support.core_world import settings as world_settings


def asked(*signals: str) -> Lengths:
    return Lengths(LengthHistory(), signals=signals or ("Ranker",), ranker=AnsweredRanker())


def questions(lengths: Lengths) -> list[str]:
    return [prompt for _, prompt in lengths.take_questions()[0]]


# ---- a ranker in another process


def test_a_prompt_is_unknown_until_its_answer_has_come() -> None:
    lengths, key = asked(), prompt_key("a")
    lengths.expect("a")
    assert questions(lengths) == ["a"]
    assert questions(lengths) == []
    assert lengths.ranked({key: 1.5}) == []
    assert lengths.predict(key, prompt="a").source == "Ranker"
    assert lengths.predict(prompt_key("b"), prompt="b").source == "Nothing"


def test_finished_groups_are_passed_on() -> None:
    lengths = asked()
    lengths.learn(prompt_key("a"), tokens=[2, 4], prompt="a", group_id=1)
    assert lengths.take_questions() == ((), (("a", 3.0),))


def pairs_after(lengths: Lengths, *, groups: int, renewed: bool) -> int:
    """Pairs of the ranker's evidence, when each group's answer came while it waited."""
    for number in range(groups):
        prompt, key = f"question {number}", prompt_key(f"question {number}")
        lengths.began(number, key=key, prompt=prompt)
        assert lengths.ranked({key: float(number)}) == [number]
        if renewed:
            lengths.renew(number, key=key)
        lengths.learn(key, tokens=[number], prompt=prompt, group_id=number)
    quality = lengths.view().quality["Ranker"]
    assert quality.rank_correlation is None or quality.rank_correlation > 0.9
    return quality.pairs


def test_a_late_answer_counts_only_for_a_group_that_was_predicted_anew_before_it_began() -> None:
    """What was not known when the group's first sample was issued is no evidence."""
    assert pairs_after(asked(), groups=32, renewed=True) == 32
    assert pairs_after(asked(), groups=32, renewed=False) == 0


def test_an_answer_for_a_group_that_has_finished_changes_nothing() -> None:
    lengths, key = asked(), prompt_key("a")
    lengths.began(1, key=key, prompt="a")
    lengths.learn(key, tokens=[3], prompt="a", group_id=1)
    assert lengths.ranked({key: 2.0}) == []
    lengths.began(2, key=key, prompt="a")
    lengths.forget(2, key=key)
    assert lengths.ranked({key: 1.0}) == []


def test_a_late_answer_has_its_place_in_the_ladder() -> None:
    lengths = asked("Ranker", "History")
    key = prompt_key("a")
    lengths.learn(key, tokens=[5], prompt="a")
    lengths.began(1, key=key, prompt="a")
    assert lengths.predict(key, prompt="a").source == "History"
    assert lengths.ranked({key: 1.0}) == [1]
    assert lengths.predict(key, prompt="a").source == "Ranker"


class RankedWorld(World):
    """Everybody around the core, and a ranker that answers as soon as it is asked."""

    def __init__(self, lengths: Lengths, *, answers: bool) -> None:
        self.answers = answers
        self.asked: list[str] = []
        self.taught: list[str] = []
        super().__init__(world_settings(evaluation_prompts=2), lengths=lengths)

    def do(self, effects: list[fx.Effect]) -> None:
        super().do(effects)
        for effect in effects:
            if isinstance(effect, fx.AskRanker):
                self.asked += [prompt for _, prompt in effect.prompts]
                self.taught += [prompt for prompt, _ in effect.pairs]
                if self.answers and effect.prompts:
                    self.do(self.core.prompts_ranked({key: float(len(prompt)) for key, prompt in effect.prompts}))
            if isinstance(effect, fx.RankSome):
                self.do(self.core.rank_some())


@pytest.mark.parametrize("answers", [True, False])
def test_a_run_ends_whether_the_ranker_answers_or_not(answers: bool) -> None:
    lengths = asked("Ranker")
    world = RankedWorld(lengths, answers=answers)
    world.run_out()
    assert world.finished
    assert len(world.taught) == 12, "each group once"
    assert set(world.taught) <= set(world.asked), "each prompt was asked before its group began"
    assert len(world.asked) == 12, "held-out prompts are not asked, others once for each group"
    predictions = lengths.view().predictions
    assert sum(predictions.values()) == 12
    assert (predictions.get("Ranker", 0) > 0) == answers


# ---- a light ranker that puts work off


def text(number: int, *, chars: int = 60) -> str:
    return (f"question {number}: what is the sum of {number * 7} and {number % 13}? " * 100)[:chars]


def test_deferred_work_comes_to_the_same_as_work_at_once() -> None:
    at_once, later = HashingRanker(), DeferredRanker(HashingRanker())
    for number in range(120):
        at_once.learn(text(number), float(number))
        later.learn(text(number), float(number))
    while later.backlog:
        later.work()
    prompts = [text(number) for number in range(200, 240)]
    for prompt in prompts:
        assert later.score(prompt) is None
        later.ask(prompt)
    while later.backlog:
        later.work()
    assert [later.score(prompt) for prompt in prompts] == pytest.approx(
        [at_once.score(prompt) for prompt in prompts], abs=1e-5
    )


def test_a_score_is_that_of_what_has_been_learnt_until_now() -> None:
    later = DeferredRanker(HashingRanker())
    later.ask(text(1))
    assert later.work() == {}, "nothing is learnt yet"
    scores = []
    for tokens in (100.0, 1e6):
        for _ in range(20):
            later.learn(text(1), tokens)
            later.learn("something else", 100.0)
        while later.backlog:
            later.work()
        scores.append(later.score(text(1)) or 0.0)
    assert scores[1] > scores[0] + 1


@settings(max_examples=30)
@given(prompts=st.integers(0, 40), pairs=st.integers(0, 40), chars=st.integers(1, 5000), seed=st.integers(0, 9))
def test_no_portion_is_long_and_all_work_is_done(prompts: int, pairs: int, chars: int, seed: int) -> None:
    """Characters that are read or learnt in one portion: at most one prompt or pair beyond the bound."""
    read: list[int] = []
    features = deferred_module.features

    def counted(prompt: str) -> dict[int, float]:
        read.append(min(len(prompt), deferred_module.MAX_CHARS))
        return features(prompt)

    draw, later = Random(seed), DeferredRanker(HashingRanker())
    for number in range(prompts):
        later.ask(text(number, chars=draw.randint(1, chars)))
    for number in range(pairs):
        later.learn(text(1000 + number, chars=draw.randint(1, chars)), 3.0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(deferred_module, "features", counted)
        portions = 0
        while later.backlog:
            before = later.backlog
            read.clear()
            later.work()
            portions += 1
            assert sum(read[:-1]) < PORTION_CHARS
            assert later.backlog < before
    assert portions <= prompts + pairs


def test_the_newest_prompts_are_read_first() -> None:
    later = DeferredRanker(HashingRanker())
    later.learn(text(0), 5.0)
    later.work()
    for number in range(1, 30):
        later.ask(text(number, chars=1000))
    first = later.work()
    assert prompt_key(text(29, chars=1000)) in first
    assert prompt_key(text(1, chars=1000)) not in first


def worked_off(lengths: Lengths) -> None:
    while lengths.has_work:
        lengths.work()


def test_what_is_looked_ahead_at_is_known_when_it_begins_however_large_the_batches() -> None:
    lengths = Lengths(LengthHistory(), signals=("Ranker",), ranker=DeferredRanker(HashingRanker()))
    lengths.learn(prompt_key("first"), tokens=[5], prompt="first")
    worked_off(lengths)
    prompts = [f"{number}?" for number in range(3 * MAX_LOOK_AHEAD // 2)]
    for number in range(len(prompts)):
        if number == MAX_LOOK_AHEAD:  # half of them have begun: as many more are asked for, before the work is done
            begin(lengths, prompts[: MAX_LOOK_AHEAD // 2])
        lengths.expect(prompts[number])
        if number == MAX_LOOK_AHEAD - 1:
            worked_off(lengths)
    worked_off(lengths)
    begin(lengths, prompts[MAX_LOOK_AHEAD // 2 :])
    assert lengths.view().predictions == {"Ranker": len(prompts)}


def begin(lengths: Lengths, prompts: list[str]) -> None:
    for prompt in prompts:
        key = prompt_key(prompt)
        lengths.began(key, key=key, prompt=prompt)


def test_prompts_that_come_again_are_not_read_again_soon() -> None:
    later = DeferredRanker(HashingRanker())
    for _ in range(3):
        later.ask("again")
        later.learn("again", 5.0)
        later.work()
    later.ask("again")
    assert later.backlog == 0
    assert later.score("again") is not None


def test_in_a_run_prompts_are_read_and_learnt_between_events() -> None:
    ranker = HashingRanker()
    ranker.learn("question", 3.0)
    lengths = Lengths(LengthHistory(), signals=("Ranker",), ranker=DeferredRanker(ranker))
    world = RankedWorld(lengths, answers=True)
    world.run_out()
    assert world.finished
    assert not lengths.has_work
    assert lengths.view().predictions["Ranker"] > 0
