"""The chart's alerts, evaluated by Prometheus' own `promtool` over made-up time series (`alerts.yaml`)."""

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from support.chart import Objects
from support.tree import ROOT

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
    done = subprocess.run([promtool, "test", "rules", tests], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_a_case_in_which_it_fires(rules: Path) -> None:
    names = {rule["alert"] for rule in alerts(rules)}
    checks = [check for one in YAML(typ="safe").load(TESTS)["tests"] for check in one["alert_rule_test"]]
    assert {check["alertname"] for check in checks if check["exp_alerts"]} == names
    assert {check["alertname"] for check in checks if not check["exp_alerts"]} == names


def test_each_alert_clears_after_it_has_fired(rules: Path) -> None:
    cleared: set[str] = set()
    for one in YAML(typ="safe").load(TESTS)["tests"]:
        checks = [
            (check["alertname"], minutes(check["eval_time"]), check["exp_alerts"]) for check in one["alert_rule_test"]
        ]
        fired = {name: at for name, at, expected in checks if expected}
        cleared |= {name for name, at, expected in checks if not expected and at > fired.get(name, at)}
    assert cleared == {rule["alert"] for rule in alerts(rules)}


def test_each_alert_has_its_section_in_the_runbooks(rules: Path) -> None:
    page = (ROOT / "docs/runbooks.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## (\w+)$", page, flags=re.MULTILINE)
    assert sorted(sections) == sorted(rule["alert"] for rule in alerts(rules))
    for rule in alerts(rules):
        assert rule["annotations"]["runbook_url"] == f"docs/runbooks.md#{rule['alert'].lower()}"


def minutes(text: str) -> int:
    return int(text.removesuffix("m"))


def alerts(rules: Path) -> list[dict[str, Any]]:
    return [rule for group in YAML(typ="safe").load(rules)["groups"] for rule in group["rules"]]
