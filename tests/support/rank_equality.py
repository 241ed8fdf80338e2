"""Models that several ranks train by `tensor_ranks`, against one rank."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from support.model_families import save_tiny
from support.tensor_ranks import trained

TESTS = Path(__file__).parents[1]
EVEN = {"vocab_size": 48, "num_key_value_heads": 2}
"""Sizes that two ranks divide."""
CLIPPED = {"gradientClipNorm": 0.5, "learningRate": 1e-4}
"""Small steps: AdamW divides gradients of rounding noise by their own size."""
KL = {"referenceKl": {"coefficient": 0.1}}


def save(family: str, folder: Path, *, job: dict[str, Any] | None = None, **changes: Any) -> Path:
    """Save a tiny model, with the job that trains it."""
    save_tiny(family, folder, **{**EVEN, **changes})
    (folder / "trainer.json").write_text(json.dumps({**CLIPPED, **(job or {})}))
    return folder


def run(folder: Path, models: list[Path], **layout: int) -> dict[str, Any]:
    """Return what rank 0 of a team writes of each model. `layout`: as of `tensor_ranks.Ranks`."""
    environ = {**os.environ, "PYTHONPATH": str(TESTS), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-W", "error", "-m", "support.tensor_ranks"]
    folder.mkdir(exist_ok=True)
    processes = [
        subprocess.Popen([*command, str(rank), json.dumps(layout), str(folder), *map(str, models)], env=environ)
        for rank in range(prod(layout.values()))
    ]
    assert {process.wait() for process in processes} == {0}
    return {model.name: torch.load(folder / f"{model.name}.pt", weights_only=False) for model in models}


def check_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare numbers, gradients and weights of several ranks with those of one."""
    for numbers, others in zip(found["numbers"], expected["numbers"], strict=True):
        assert numbers.pop("losses") == pytest.approx(others["losses"], rel=1e-5, abs=1e-6)
        assert numbers == pytest.approx({name: others[name] for name in numbers}, rel=1e-5)
        assert others["gradient_norm"] > CLIPPED["gradientClipNorm"], "nothing was clipped"
    assert found["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        torch.testing.assert_close(
            found["gradients"][name], gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max())
        )
    check_weights(found, expected)


def check_weights(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare weights of several ranks with those of one."""
    assert found["weights"].keys() == expected["weights"].keys()
    for name, data in expected["weights"].items():
        one, other = (torch.frombuffer(bytearray(each), dtype=torch.float32) for each in (found["weights"][name], data))
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def check_resumed(model: Path, layouts: Iterable[Mapping[str, int]], *, folder: Path) -> None:
    """Let each layout resume after two updates of the one before it; its third update must equal one rank's."""
    expected = trained(model)
    before: Path | None = None
    for number, layout in enumerate(layouts):
        place = folder / str(number)
        place.mkdir()
        if before is not None:
            (before / f"{model.name}-saved").rename(place / f"{model.name}-loaded")
        (found,) = run(place, [model], **layout).values()
        check_weights(found, expected)
        before = place


def check_published(found: dict[str, Any], *, replicas: int = 1) -> None:
    """Each rank of the first replica copies its own rows; together they are what is gathered, each byte once."""
    parts = found["published"]
    slices = sorted((key, data) for part in parts for key, data in part.items() if data)
    for name, whole in found["weights"].items():
        assert b"".join(data for (tensor, _), data in slices if tensor == name) == whole, name
    total = sum(map(len, found["weights"].values()))
    assert max(sum(map(len, part.values())) for part in parts) < 1.2 * total * replicas / len(parts) + 4096
