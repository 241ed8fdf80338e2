"""Which part of the wall each situation of a generator belongs to."""

import dataclasses

import pytest

from streamrl_workers.generator.activity import Situation, activity
from streamrl_workers.metrics.bubbles import State, generating

IDLE = Situation(
    connected=True,
    usable=True,
    swapping=False,
    pulling=False,
    blocked=False,
    active=0,
    slots=8,
    queued=False,
    idle_cause="no_prompts",
)


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, State(part="pipeline_no_prompts")),
        ({"connected": False}, State(part="other")),
        ({"connected": False, "active": 3, "usable": False}, State(part="other")),
        ({"usable": False}, State(part="weights")),
        ({"usable": False, "idle_cause": "staleness"}, State(part="weights")),
        ({"swapping": True, "active": 8}, State(part="weights")),
        ({"active": 2}, generating(active=2, slots=8, waiting=False)),
        ({"active": 2}, State(part="busy", skew_share=0.75)),
        ({"active": 2, "queued": True}, State(part="busy")),
        ({"active": 2, "pulling": True}, State(part="busy", skew_share=0.75)),
        ({"active": 2, "idle_cause": "staleness"}, State(part="busy", skew_share=0.75)),
        ({"active": 2, "blocked": True}, State(part="pipeline_back_pressure")),
        ({"idle_cause": "staleness"}, State(part="pipeline_staleness")),
        ({"idle_cause": "staleness", "pulling": True}, State(part="weights")),
        ({"idle_cause": "turn"}, State(part="pipeline_turn")),
        ({"idle_cause": "turn", "pulling": True}, State(part="weights")),
        ({"idle_cause": "no_weights"}, State(part="weights")),
        ({"idle_cause": "back_pressure", "pulling": True}, State(part="pipeline_back_pressure")),
        ({"idle_cause": "ended"}, State(part="other")),
    ],
)
def test_situations(changes, state):
    assert activity(dataclasses.replace(IDLE, **changes)) == state
