"""The learning rate of each step, as tables."""

import pytest

from streamrl_workers.trainer.engines.schedule import Schedule


@pytest.mark.parametrize(
    ("kind", "warm_up", "steps", "expected"),
    [
        ("Constant", 0, 3, [1.0, 1.0, 1.0]),
        ("Constant", 2, 4, [0.5, 1.0, 1.0, 1.0]),
        ("Linear", 0, 4, [1.0, 0.75, 0.5, 0.25]),
        ("Linear", 2, 6, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("Cosine", 0, 4, [1.0, 0.8535534, 0.5, 0.1464466]),
        ("Cosine", 1, 3, [1.0, 1.0, 0.5]),
        ("Linear", 8, 4, [0.125, 0.25, 0.375, 0.5]),
        ("Cosine", 0, 1, [1.0]),
    ],
)
def test_rates(kind, warm_up, steps, expected):
    schedule = Schedule(kind=kind, peak=2e-3, warm_up_steps=warm_up, steps=steps)
    assert [schedule.at(step) for step in range(steps)] == pytest.approx([2e-3 * share for share in expected])


def test_a_step_beyond_the_end_has_no_negative_rate():
    assert Schedule(kind="Linear", peak=1.0, warm_up_steps=0, steps=4).at(9) == 0.0
    assert Schedule(kind="Cosine", peak=1.0, warm_up_steps=0, steps=4).at(9) == pytest.approx(0.0)
