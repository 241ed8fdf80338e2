"""What a ranker says counts for groups that begin to wait behind its answer."""

from collections.abc import Mapping

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.dispatch.order import LONGEST_FIRST
from streamrl_workers.scheduler.lengths import LengthHistory, Lengths, prompt_key
from streamrl_workers.scheduler.model import Group, GroupPrompt, GroupTable, Window
from streamrl_workers.scheduler.planning import PromptGroups, WaitingGroups
from streamrl_workers.scheduler.sample import Sample
from streamrl_workers.scheduler.settings import TaskSettings

GROUPS = 6


def queue(answers: Mapping[str, float] = {}) -> tuple[WaitingGroups, GroupTable, Lengths]:
    """Six groups that wait; the ranker has answered so many prompts before."""
    lengths = Lengths(LengthHistory(), signals=("Ranker",))
    lengths.learn(prompt_key("before"), tokens=list(range(1, 100)), prompt="before")
    lengths.ranked({prompt_key(prompt): score for prompt, score in answers.items()})
    groups = GroupTable(Window(batch_groups=GROUPS, staleness=0, step=0))
    waiting = WaitingGroups(groups, order=LONGEST_FIRST, lengths=lengths, batch_groups=GROUPS)
    source = PromptGroups(group_size=2, waiting=waiting)
    for number in range(GROUPS):
        prompt = GroupPrompt(index=number, key=prompt_key(f"p{number}"), text=f"p{number}")
        group = Group(group_id=number, prompt=prompt, source=source, task=TaskSettings(sampling=pb.Sampling()))
        group.begin_with([Sample(0), Sample(1)])
        groups.add(group)
        waiting.put(group, [1, 0])
    return waiting, groups, lengths


def order(waiting: WaitingGroups) -> list[int]:
    """Groups as they would begin."""
    found = []
    while (group := waiting.first_fresh(long=False)) is not None:
        found.append(group.group_id)
        waiting.discard(group)
    return found


def test_an_answer_that_comes_when_the_group_waits_changes_neither_its_place_nor_the_evidence() -> None:
    waiting, _, lengths = queue()
    lengths.ranked({prompt_key(f"p{number}"): float(number) for number in range(GROUPS)})
    assert order(waiting) == list(range(GROUPS))
    for number in range(GROUPS):
        lengths.learn(prompt_key(f"p{number}"), tokens=[number], prompt=f"p{number}", group_id=number)
    for number in range(10):  # trust is looked at every 16 pairs
        lengths.ranked({prompt_key(f"q{number}"): 0.0})
        lengths.began(100 + number, key=prompt_key(f"q{number}"))
        lengths.learn(prompt_key(f"q{number}"), tokens=[1], prompt=f"q{number}", group_id=100 + number)
    assert lengths.quality["Ranker"].pairs == 0


def test_groups_that_begin_to_wait_behind_the_answers_are_in_their_order() -> None:
    waiting, _, _ = queue(answers={f"p{number}": score for number, score in enumerate((3, 1, 6, 2, 5, 4))})
    assert all(group.is_known for group in waiting.batch())
    assert order(waiting) == [2, 4, 5, 0, 3, 1]
