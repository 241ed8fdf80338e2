"""The chart's alerts, evaluated by Prometheus' own `promtool` over made-up time series (`alerts.yaml`)."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from support.chart import Objects

HERE = Path(__file__).parent
TESTS = HERE / "alerts.yaml"


@pytest.fixture
def rules(objects: Callable[..., Objects], tmp_path: Path) -> Path:
    """The rules as the chart renders them, in a file of Prometheus' own form."""
    (found,) = (one for one in objects("--set", "metrics.rules.enabled=true") if one["kind"] == "PrometheusRule")
    path = tmp_path / "rules.yaml"
    YAML(typ="safe").dump(found["spec"], path)
    return path


def test_prometheus_takes_the_rules(promtool: Path, rules: Path) -> None:
    done = subprocess.run([promtool, "check", "rules", rules], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_fire_when_they_should_and_not_before(promtool: Path, rules: Path) -> None:
    tests = shutil.copy(TESTS, rules.parent / TESTS.name)
    done = subprocess.run([promtool, "test", "rules", tests], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_a_case_in_which_it_fires(rules: Path) -> None:
    yaml = YAML(typ="safe")
    alerts = {rule["alert"] for group in yaml.load(rules)["groups"] for rule in group["rules"]}
    checks = [check for one in yaml.load(TESTS)["tests"] for check in one["alert_rule_test"]]
    assert {check["alertname"] for check in checks if check["exp_alerts"]} == alerts
    assert {check["alertname"] for check in checks if not check["exp_alerts"]} == alerts
