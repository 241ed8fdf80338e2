"""Order of the central queue: policies, length history, seeds."""

import pytest

from streamrl.spec.scheduling import Dispatch
from streamrl_workers.scheduler.dispatch import POLICIES, Candidate, policy
from streamrl_workers.scheduler.lengths import LengthHistory, prompt_key
from streamrl_workers.scheduler.seeds import sample_seed

LENGTHS = {0: 5.0, 1: 50.0, 2: 20.0, 3: 90.0, 4: 20.0}


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("fifo", [0, 1, 2, 3, 4]),
        ("lateBinding", [1, 2, 0, 3, 4]),  # longest first within each batch of three
    ],
)
def test_order(key, expected):
    candidates = [
        Candidate(group_id=group_id, wave=group_id // 3, predicted_tokens=tokens)
        for group_id, tokens in LENGTHS.items()
    ]
    assert [candidate.group_id for candidate in sorted(candidates, key=policy(key))] == expected


def test_without_predictions_the_order_is_that_of_planning():
    candidates = [Candidate(group_id=group_id, wave=0, predicted_tokens=0.0) for group_id in (2, 0, 1)]
    assert [candidate.group_id for candidate in sorted(candidates, key=policy("lateBinding"))] == [0, 1, 2]


def test_registry_and_contract_agree():
    assert tuple(POLICIES) == Dispatch.choices()


def test_unknown_policy_names_the_known():
    with pytest.raises(ValueError, match="unknown dispatch policy 'random'; known: fifo, lateBinding"):
        policy("random")


def test_history_predicts_the_prompt_then_the_mean_then_nothing():
    history = LengthHistory()
    assert history.predict(1) == 0.0
    history.learn(1, mean_tokens=10.0)
    history.learn(1, mean_tokens=20.0)
    history.learn(2, mean_tokens=45.0)
    assert history.predict(1) == 15.0
    assert history.predict(3) == 30.0


def test_history_forgets_what_was_not_seen_for_long():
    history = LengthHistory({1: 1.0, 2: 2.0}, max_prompts=2)
    history.learn(1, mean_tokens=1.0)
    history.learn(3, mean_tokens=3.0)
    assert history.means() == {1: 1.0, 3: 3.0}
    assert history.predict(9) == 2.0


def test_prompt_key_is_stable_and_fits_63_bits():
    assert prompt_key("2 + 2 =") == prompt_key("2 + 2 =") != prompt_key("2 + 3 =")
    assert 0 < prompt_key("") < 1 << 63


def test_seeds_are_fixed_and_differ():
    seeds = {sample_seed(1, group_id=group, sample_index=index) for group in range(100) for index in range(16)}
    assert len(seeds) == 1600
    assert sample_seed(1, group_id=2, sample_index=3) == sample_seed(1, group_id=2, sample_index=3)
    assert sample_seed(0, group_id=0, sample_index=0) == 2558736989570252433
