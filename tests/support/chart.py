"""The chart for tests: where it is, and the real `helm` that reads it."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.harness import tools

CHART = Path(__file__).parents[2] / "helm/streamrl"
MEMBER_CHART = CHART.parent / "streamrl-member"
HELM_S = 120
REGISTRY = "registry.example.com/rl"
_RENDERS = ("template", "install", "upgrade", "lint")

Objects = list[dict[str, Any]]
Helm = Callable[..., subprocess.CompletedProcess[str]]


def runner(home: Path, kubeconfig: Path | None = None, *, registry: str = REGISTRY) -> Helm:
    """Something that runs helm with arguments; it keeps its files in `home`. Images are in `registry` (empty: the chart has none), unless the
    arguments say otherwise."""
    program = str(tools.tool("helm"))
    variables = {f"HELM_{name}_HOME": str(home / name.lower()) for name in ("CACHE", "CONFIG", "DATA")}
    variables["KUBECONFIG"] = str(kubeconfig or home / "none")

    def run(command: str, *arguments: str, check: bool = True, stdin: str = "") -> subprocess.CompletedProcess[str]:
        own = ("--set", f"images.registry={registry}") if registry and command in _RENDERS else ()
        done = subprocess.run(
            [program, command, *own, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=HELM_S,
            check=False,
            env=os.environ | variables,
        )
        assert not (check and done.returncode), f"helm {' '.join((command, *arguments))}: {done.stderr}"
        return done

    return run
