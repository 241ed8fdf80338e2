"""A data set or reward that the contract names exists, and the other way round."""

from streamrl.spec.tasks.datasets import Dataset
from streamrl.spec.tasks.rewards import Reward
from streamrl_workers.rewards.registry import REWARDS
from streamrl_workers.tasks.dataset import DATASETS


def test_data_sets_are_those_of_the_contract() -> None:
    assert set(DATASETS) == set(Dataset.choices())


def test_rewards_are_those_of_the_contract() -> None:
    assert set(REWARDS) == set(Reward.choices())
