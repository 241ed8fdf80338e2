"""The operator's environment, its logs, and what makes a status differ."""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from streamrl.errors import UserError
from streamrl_operator.apply import status_differs
from streamrl_operator.main import JsonFormatter
from streamrl_operator.settings import from_environment

LEAST = {"STREAMRL_TRAINER_IMAGE": "t:1", "STREAMRL_GENERATOR_IMAGE": "g:1"}


def test_defaults() -> None:
    found = from_environment(LEAST)
    assert (found.planning.trainer_image, found.planning.generator_image) == ("t:1", "g:1")
    assert (found.planning.namespaces, found.planning.namespace, found.planning.resync_s) == ((), "default", 30)
    assert (found.port, found.kubeconfig, found.log_level) == (8080, None, "INFO")
    assert (found.lease_settings.lease_s, found.lease_settings.renew_s, found.lease_settings.retry_s) == (15, 10, 2)
    assert (found.lives.ca_s, found.lives.leaf_s) == (365 * 86_400, 30 * 86_400)


def test_everything() -> None:
    found = from_environment(
        LEAST
        | {
            "STREAMRL_NAMESPACES": "b, a a",
            "STREAMRL_RESYNC_SECONDS": "2",
            "STREAMRL_LEASE_SECONDS": "3",
            "STREAMRL_LEAF_LIFE_SECONDS": "60",
            "STREAMRL_SIGNALS_PORT": "0",
            "STREAMRL_LOG_LEVEL": "debug",
            "POD_NAME": "operator-0",
            "POD_NAMESPACE": "streamrl",
            "KUBECONFIG": "/a/b:/c",
        }
    )
    assert (found.planning.namespaces, found.planning.namespace) == (("a", "b"), "streamrl")
    assert (found.planning.resync_s, found.lease_settings.renew_s, found.lives.leaf_s, found.port) == (2, 2, 60, 0)
    assert (found.kubeconfig, found.log_level) == (Path("/a/b"), "DEBUG")
    assert found.identity.startswith("operator-0_")
    assert found.identity != from_environment(LEAST | {"POD_NAME": "operator-0"}).identity


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"STREAMRL_TRAINER_IMAGE": " "}, "STREAMRL_TRAINER_IMAGE: is required; set it to an image (the chart does)"),
        (
            {"STREAMRL_LEASE_SECONDS": "0"},
            "STREAMRL_LEASE_SECONDS: must be a number, at least 1, got '0'; unset it for 15",
        ),
        ({"STREAMRL_RESYNC_SECONDS": "nan"}, "STREAMRL_RESYNC_SECONDS: must be a number, at least 0.1, got 'nan'"),
        ({"STREAMRL_SIGNALS_PORT": "99999"}, "STREAMRL_SIGNALS_PORT: must be a number, from 0 to 65535, got '99999'"),
        ({"STREAMRL_LOG_LEVEL": "loud"}, "STREAMRL_LOG_LEVEL: must be one of DEBUG, INFO, WARNING, ERROR, got 'LOUD'"),
    ],
)
def test_mistakes(change: dict[str, str], line: str) -> None:
    with pytest.raises(UserError) as caught:
        from_environment(LEAST | change)
    assert str(caught.value).startswith(line)


def test_a_log_line() -> None:
    try:
        int("wrong")
    except ValueError:
        info = sys.exc_info()
    record = logging.LogRecord(
        "streamrl_operator.controller", logging.WARNING, "f", 1, "reconcile %s", ("failed",), info
    )
    record.job = "sums"
    line = json.loads(JsonFormatter().format(record))
    assert (line["level"], line["logger"], line["message"], line["job"]) == (
        "warning",
        "controller",
        "reconcile failed",
        "sums",
    )
    assert "ValueError: invalid literal" in line["trace"]
    assert "args" not in line


@pytest.mark.parametrize(
    ("ours", "stored", "differs"),
    [
        ({"step": 1}, {"step": 1}, False),
        ({"step": 1}, {"step": 1, "conditions": [], "pools": None}, False),
        ({"step": 1, "conditions": []}, {"step": 1}, False),
        ({"step": 0}, {}, True),
        ({"step": 1}, {"step": 2}, True),
        ({}, {"queue": 3}, True),
        ({"conditions": [{"type": "A", "message": ""}]}, {"conditions": [{"type": "A"}]}, True),
        ({"conditions": ({"type": "A"},)}, {"conditions": [{"type": "A"}]}, False),
    ],
)
def test_when_a_status_is_written(ours: dict[str, Any], stored: dict[str, Any], *, differs: bool) -> None:
    assert status_differs(ours, stored) == differs
