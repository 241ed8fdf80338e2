"""What a ranker says of groups that already wait: those that have never been out go where it puts them, and are judged by it."""

from streamrl_workers.scheduler.dispatch.longest_first import LONGEST_FIRST
from streamrl_workers.scheduler.groups.sample import Sample
from streamrl_workers.scheduler.groups.staleness import Window
from streamrl_workers.scheduler.groups.table import Group, GroupTable
from streamrl_workers.scheduler.groups.waiting import WaitingGroups
from streamrl_workers.scheduler.lengths import LengthHistory, Lengths, RemoteRanker, prompt_key

GROUPS = 6


def queue() -> tuple[WaitingGroups, GroupTable, Lengths]:
    """Six groups that wait, in the order of planning: nothing is known of them."""
    lengths = Lengths(LengthHistory(), signals=("Ranker",), ranker=RemoteRanker())
    lengths.learn(prompt_key("before"), tokens=list(range(1, 100)), prompt="before")
    groups = GroupTable(Window(batch_groups=GROUPS, staleness=0, step=0))
    waiting = WaitingGroups(groups, order=LONGEST_FIRST, lengths=lengths, batch_groups=GROUPS)
    for number in range(GROUPS):
        group = Group(number, number)
        group.prompt, group.prompt_key = f"p{number}", prompt_key(f"p{number}")
        group.samples = [Sample(0), Sample(1)]
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


def test_answers_put_waiting_groups_in_order() -> None:
    waiting, _, lengths = queue()
    late = lengths.ranked({prompt_key(f"p{number}"): float(score) for number, score in enumerate((3, 1, 6, 2, 5, 4))})
    waiting.renew(late)
    assert order(waiting) == [2, 4, 5, 0, 3, 1]


def test_an_order_is_told_of_which_groups_nothing_is_known() -> None:
    waiting, _, lengths = queue()
    assert not any(group.is_known for group in waiting.batch())
    waiting.renew(lengths.ranked({prompt_key("p1"): 2.0, prompt_key("p4"): 7.0}))
    assert [group.group_id for group in waiting.batch() if group.is_known] == [1, 4]


def test_a_group_that_has_been_out_stays_where_it_is_and_is_no_evidence() -> None:
    waiting, groups, lengths = queue()
    groups[5].samples[0].issues = 1
    waiting.renew(lengths.ranked({prompt_key(f"p{number}"): float(number) for number in range(GROUPS)}))
    assert order(waiting) == [4, 3, 5, 2, 1, 0], "group 5 in the middle, as what nothing is known of"
    for number in range(GROUPS):
        lengths.learn(prompt_key(f"p{number}"), tokens=[number], prompt=f"p{number}", group_id=number)
    for number in range(11):  # trust is looked at every 16 pairs
        lengths.ranked({prompt_key(f"q{number}"): 0.0})
        lengths.began(100 + number, key=prompt_key(f"q{number}"), prompt=f"q{number}")
        lengths.learn(prompt_key(f"q{number}"), tokens=[1], prompt=f"q{number}", group_id=100 + number)
    assert lengths.view().quality["Ranker"].pairs == 16
