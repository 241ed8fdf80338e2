"""The learning rate of each step, as tables."""

import pytest

from streamrl_workers.trainer.engines.worker import learning_rate
from support.trainer_groups import trainer_spec


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
    trainer = trainer_spec(schedule=kind, learningRate=2e-3, warmUpSteps=warm_up).trainer
    assert [learning_rate(step, spec=trainer, steps=steps) for step in range(steps)] == pytest.approx(
        [2e-3 * share for share in expected]
    )


def test_a_step_beyond_the_end_has_no_negative_rate():
    for kind in ("Linear", "Cosine"):
        trainer = trainer_spec(schedule=kind, learningRate=1e-3, warmUpSteps=0).trainer
        assert learning_rate(9, spec=trainer, steps=4) == pytest.approx(0.0)
