"""The condition ProcessFrozen, by the warnings of a scheduler's page."""

from support.job_lives import conditions, lived, message, running
from support.observed_jobs import page

FROZEN = "ProcessFrozen"
SUCCESS = page(step=20, ended=True, result={"status": "succeeded", "steps": 20})


def test_a_process_without_a_sign_of_life_is_a_condition_until_it_has_one_or_the_job_has_no_pods() -> None:
    frozen = [{"type": FROZEN, "message": f"{name} has shown no sign of life for 30 s"} for name in ("one", "two")]
    well, decision = lived({"numbers": page(warnings=[])}, start=running())
    assert FROZEN not in conditions(decision)
    silent, decision = lived(
        {"numbers": page(warnings=[*frozen, {"type": "SequencesClipped", "message": "n"}])}, start=well
    )
    assert conditions(decision)[FROZEN] == ("True", "NoSignOfLife")
    assert message(decision, FROZEN) == "; ".join(one["message"] for one in frozen)
    assert conditions(decision)["Ready"] == ("True", "Running"), "the job goes on"
    _, decision = lived({"numbers": None}, start=silent)
    assert conditions(decision)[FROZEN] == ("True", "NoSignOfLife"), "nothing newer is known"
    for after in ({"numbers": page(warnings=[])}, {"numbers": SUCCESS}):
        _, decision = lived(after, start=silent)
        assert (conditions(decision)[FROZEN], message(decision, FROZEN)) == (("False", "AllAlive"), "")
