"""`maxCost`: a job that has cost so much is suspended until the amount is raised, or warned of."""

from streamrl_operator.planning.values import Observed
from support.job_lives import conditions, edited, lived, message, reasons, reported, running
from support.observed_jobs import page


def dear(amount: str, *, cost: float, action: str = "Suspend") -> Observed:
    """A running job whose page says what it has cost."""
    look = edited(running(), maxCost={"amount": amount, "action": action})
    return lived({"numbers": page(cost=cost)}, {}, {}, start=look)[0]


def test_a_job_within_its_cost_says_so_and_goes_on() -> None:
    decision = reported(dear("10", cost=9.5))
    assert conditions(decision)["CostAboveMax"] == ("False", "WithinMaxCost")
    assert decision.wanted.trainers == 1
    assert decision.status["cost"] == 9.5


def test_a_job_that_costs_too_much_is_suspended_until_the_amount_is_raised() -> None:
    look = edited(running(), maxCost={"amount": "10"})
    look, decision = lived({}, {}, {"numbers": page(cost=10.0)}, start=look)
    assert (reasons(decision), conditions(decision)["CostAboveMax"]) == (["AboveMaxCost"], ("True", "AboveMaxCost"))
    look, decision = lived({}, start=look)
    assert (decision.wanted.trainers, decision.wanted.generators) == (0, {"sim": 0})
    assert conditions(decision)["Suspended"] == ("False", "Suspending")
    look, decision = lived({"pods": (), "numbers": None}, start=look)
    assert conditions(decision)["Suspended"] == ("True", "Suspended")
    assert message(decision, "Suspended") == "the job has cost maxCost.amount 10: no pods; volumes stay"
    assert conditions(decision)["CostAboveMax"] == ("True", "AboveMaxCost")
    assert lived({}, start=look)[1].events == (), "it is said once"
    decision = reported(edited(look, maxCost={"amount": "20"}))
    assert (decision.wanted.trainers, reasons(decision)) == (1, ["Resumed"])
    assert conditions(decision)["CostAboveMax"] == ("False", "WithinMaxCost")


def test_a_job_that_is_only_warned_of_goes_on() -> None:
    look = dear("10", cost=12.0, action="Warn")
    decision = reported(look)
    assert (decision.wanted.trainers, reasons(decision)) == (1, [])
    assert conditions(decision)["CostAboveMax"] == ("True", "AboveMaxCost")
    assert "the job goes on" in message(decision, "CostAboveMax")
    assert conditions(decision)["Ready"] == ("True", "Running")


def test_what_was_spent_is_not_forgotten_with_a_scheduler() -> None:
    look = dear("100", cost=50.0)
    assert lived({"numbers": page(cost=40.0)}, {}, {}, {}, start=look)[1].status["cost"] == 50.0


def test_without_a_bound_nothing_is_said_of_cost() -> None:
    assert "CostAboveMax" not in conditions(lived({"numbers": page(cost=1e6)}, {}, {}, {}, start=running())[1])
