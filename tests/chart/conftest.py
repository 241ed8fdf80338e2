"""The chart, rendered by the real `helm`, and `promtool`; skipped where there are none yet (STREAMRL_REQUIRE=cluster: a failure instead)."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from cluster.harness import tools
from support.chart import CHART, Helm, Objects, runner

BUILD = "PYTHONPATH=tests python -m cluster.harness.tools build"


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Run helm with arguments."""
    _have("helm")
    return runner(tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="session")
def promtool() -> Path:
    """Prometheus' program for rules."""
    _have("promtool")
    return tools.tool("promtool")


@pytest.fixture(scope="session")
def prometheus() -> Path:
    """Prometheus itself."""
    _have("prometheus")
    return tools.tool("prometheus")


def _have(name: str) -> None:
    """Go on only where the program is there already."""
    if name not in tools.missing(tools.TOOLS[name].level):
        return
    if "cluster" in os.environ.get("STREAMRL_REQUIRE", "").split(","):
        pytest.fail(f"STREAMRL_REQUIRE has `cluster`, and there is no {name}; {BUILD} {name}", pytrace=False)
    pytest.skip(f"there is no {name}; {BUILD} {name}")


@pytest.fixture(scope="session")
def render(helm: Helm) -> Callable[..., str]:
    """The manifests as text: `render("--set", "replicas=2")`."""

    def run(*arguments: str, chart: Path = CHART) -> str:
        release = ("streamrl", str(chart), "--namespace", "streamrl-system")
        return helm("template", *release, "--kube-version", "1.34", *arguments).stdout

    return run


@pytest.fixture(scope="session")
def objects(render: Callable[..., str]) -> Callable[..., Objects]:
    """The same as data."""

    def run(*arguments: str, chart: Path = CHART) -> Objects:
        return [one for one in YAML(typ="safe").load_all(render(*arguments, chart=chart)) if one]

    return run
