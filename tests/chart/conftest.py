"""The chart, rendered by the real `helm`; skipped where there is none yet (STREAMRL_REQUIRE=cluster: a failure instead)."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from cluster.harness import tools
from support.chart import CHART, Helm, Objects, runner

BUILD = "PYTHONPATH=tests python -m cluster.harness.tools build helm"


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Run helm with arguments."""
    if "helm" in tools.missing():
        if "cluster" in os.environ.get("STREAMRL_REQUIRE", "").split(","):
            pytest.fail(f"STREAMRL_REQUIRE has `cluster`, and there is no helm; {BUILD}", pytrace=False)
        pytest.skip(f"there is no helm; {BUILD}")
    return runner(tmp_path_factory.mktemp("helm"))


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
