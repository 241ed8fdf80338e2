"""What a job may say about length signals: the contract's side."""

import pytest

from streamrl.errors import UserError, UserErrors
from streamrl.spec import parse_job
from streamrl.spec.scheduling import RankerSpec, Scheduling
from streamrl_workers.ranker.folder import RANKERS
from support.jobs import simulated_job


def scheduling(given: dict[str, object]) -> Scheduling:
    job = simulated_job()
    job["spec"]["scheduling"] = given
    return parse_job(job).spec.scheduling


def test_registry_and_contract_agree() -> None:
    assert tuple(RANKERS) == RankerSpec.choices()


def test_a_job_that_says_nothing_uses_what_costs_nothing() -> None:
    found = scheduling({})
    assert (found.length_signals, found.ranker) == (("History", "Siblings"), None)


def test_a_ranker_and_its_signal() -> None:
    found = scheduling({"lengthSignals": ["History", "Ranker"], "ranker": {"languageModel": {"path": "ranker"}}})
    assert found.ranker is not None
    assert (found.ranker.key, found.ranker.value.path) == ("languageModel", "ranker")


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            {"lengthSignals": ["History", "Ranker"]},
            "spec.scheduling: ranker and the length signal Ranker must be given together, got no ranker and lengthSignals History, Ranker",
        ),
        (
            {"ranker": {"hashing": {}}},
            "spec.scheduling: ranker and the length signal Ranker must be given together, got a ranker and lengthSignals History, Siblings",
        ),
        (
            {"lengthSignals": ["Ranker"], "ranker": {"hashing": {}, "languageModel": {"path": "x"}}},
            "spec.scheduling.ranker: needs exactly one of hashing, languageModel; got hashing, languageModel",
        ),
        (
            {"lengthSignals": ["Ranker"], "ranker": {"languageModel": {}}},
            "spec.scheduling.ranker.languageModel.path: is required; give a string of 1 to 1024 characters",
        ),
    ],
)
def test_a_mistake_is_one_line(given: dict[str, object], line: str) -> None:
    with pytest.raises((UserError, UserErrors)) as caught:
        scheduling(given)
    assert str(caught.value) == line
