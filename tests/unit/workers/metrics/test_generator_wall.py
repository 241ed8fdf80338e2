"""Which part of the wall each situation of a generator belongs to."""

import dataclasses

import pytest

from streamrl_workers.metrics.bubbles import GeneratorState, WallState, generating, generator_wall

IDLE = GeneratorState(
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
        ({}, WallState(part="pipeline_no_prompts")),
        ({"connected": False}, WallState(part="other")),
        ({"connected": False, "active": 3, "usable": False}, WallState(part="other")),
        ({"usable": False}, WallState(part="weights")),
        ({"usable": False, "idle_cause": "staleness"}, WallState(part="weights")),
        ({"swapping": True, "active": 8}, WallState(part="weights")),
        ({"active": 2}, generating(active=2, slots=8, waiting=False)),
        ({"active": 2}, WallState(part="busy", skew_share=0.75)),
        ({"active": 2, "queued": True}, WallState(part="busy")),
        ({"active": 2, "pulling": True}, WallState(part="busy", skew_share=0.75)),
        ({"active": 2, "idle_cause": "staleness"}, WallState(part="busy", skew_share=0.75)),
        ({"active": 2, "blocked": True}, WallState(part="pipeline_back_pressure")),
        ({"idle_cause": "staleness"}, WallState(part="pipeline_staleness")),
        ({"idle_cause": "staleness", "pulling": True}, WallState(part="weights")),
        ({"idle_cause": "phase"}, WallState(part="pipeline_phase")),
        ({"idle_cause": "phase", "pulling": True}, WallState(part="weights")),
        ({"idle_cause": "no_weights"}, WallState(part="weights")),
        ({"idle_cause": "back_pressure", "pulling": True}, WallState(part="pipeline_back_pressure")),
        ({"idle_cause": "ended"}, WallState(part="other")),
    ],
)
def test_situations(changes, state):
    assert generator_wall(dataclasses.replace(IDLE, **changes)) == state
