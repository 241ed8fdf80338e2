"""A job with a profile of it, for tests of `streamrl plan --optimize`."""

import json
from pathlib import Path
from typing import Any

import pytest

from support.command import Outcome, streamrl
from support.jobs import simulated_job, write_prompts

SLOTS = 8
SAMPLES = 64


def job(*, replicas: int = 1, mode: str = "StreamAsync", **pool: Any) -> dict[str, Any]:
    """A real job (its trainer may have several processes) of 16 groups of 4."""
    made = simulated_job(replicas=replicas, batch_groups=16)
    spec = made["spec"]
    spec["pipeline"] = {"batchGroups": 16, "steps": 20, "mode": mode}
    spec["generators"][0] |= {"engine": {"hf": {"slots": SLOTS}}, "costPerHour": "1.00", **pool}
    spec["trainer"] = {"costPerHour": "2.00", "processesPerNode": 1}
    return made


def pool_profile(name: str = "sim", *, milliseconds: float = 10.0, tokens: tuple[int, ...] = (100,)) -> dict[str, Any]:
    point = {"milliseconds": milliseconds, "lowestMilliseconds": milliseconds, "highestMilliseconds": milliseconds}
    latency = [{"batch": batch, "steps": 80, **point} for batch in (1, SLOTS)]
    return {"name": name, "engine": "hf", "latency": latency, "fillMilliseconds": 0.0, "lengths": {"tokens": tokens}}


def profile(
    *, training: dict[int, float] | None = None, pools: list[dict[str, Any]] | None = None, **changes: Any
) -> dict[str, Any]:
    """Generation takes 8 s on one replica; training takes what `training` says, by processes, for the job's step."""
    times = training or {1: 4.0, 4: 1.0}
    step = {"samples": SAMPLES, "tokens": 6400, "repeats": 3}
    points = [step | {"processes": n, "seconds": s, "lowestSeconds": s, "highestSeconds": s} for n, s in times.items()]
    model = {"scratch": {"hiddenSize": 128, "layers": 2, "heads": 4, "intermediateSize": 256, "maxPositions": 512}}
    measured = {"pools": pools or [pool_profile()], "trainer": {"engine": "torch", "points": points}}
    return {"version": 1, "job": "simulated", "model": model, **measured, **changes}


class PlanFiles:
    """Where a test's job and profile lie."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys
        self.job, self.profile = folder / "job.yaml", folder / "profile.json"
        write_prompts(folder / "prompts.jsonl")
        self.write(job(), profile())

    def write(self, document: dict[str, Any], measured: dict[str, Any]) -> None:
        self.job.write_text(json.dumps(document))
        self.profile.write_text(json.dumps(measured))

    def plan(self, *arguments: str) -> Outcome:
        return streamrl(self.capsys, "plan", str(self.job), *arguments)

    def optimise(self, *arguments: str) -> Outcome:
        return self.plan("--optimize", "--profile", str(self.profile), *arguments)

    def chosen(self, *arguments: str) -> tuple[int, int]:
        """Generators and trainer processes in the objects."""
        done = self.optimise(*arguments, "-o", "json")
        assert done.code == 0, done.err
        items = json.loads("\n".join(done.out))["items"]
        pool = next(one for one in items if one["kind"] == "GeneratorPool")
        jobs = [line for line in done.err if line.startswith("WHY ")]
        processes = int(jobs[0].split(" and ")[1].split()[0])
        return pool["spec"]["replicas"], processes
