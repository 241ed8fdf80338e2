"""`streamrl profile` of a pool with vLLM, and the sizes that `plan --optimize` makes of it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from streamrl_cli.profiling.record import read_profile
from support.jobs import simulated_job
from support.vllm_models import make, save

DEADLINE_S = 900.0
"""On a busy machine vLLM alone takes minutes to start."""


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_pool_is_measured_and_its_sizes_are_chosen(tmp_path: Path) -> None:
    job = _write_job(tmp_path)
    out = tmp_path / "profile.json"
    _streamrl("profile", job, "--out", out, "--batches", "1,4,8", "--windows", "3", "--samples", "12", "--repeats", "1")
    pool = read_profile(out).pools[0]
    assert (pool.engine, pool.devices) == ("vllm", 1)
    assert [point.batch for point in pool.latency] == [1, 4, 8]
    assert all(point.steps >= 3 * 16 for point in pool.latency)
    one, _, eight = (point.milliseconds for point in pool.latency)
    assert eight < 8 * one, "a batch is cheaper than its sequences one by one"
    assert len(pool.lengths.tokens) == 12
    assert max(pool.lengths.tokens) <= 24
    told = _streamrl("plan", job, "--optimize", "--profile", out, "--devices", "4")
    assert "WHY " in told and "<- chosen" in told


def _streamrl(*arguments: object) -> str:
    command = [sys.executable, "-m", "streamrl_cli.main", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _write_job(folder: Path) -> Path:
    prompts = (json.dumps({"prompt": f"{a}+{a + 1}=", "answer": str(2 * a + 1)}) + "\n" for a in range(64))
    (folder / "prompts.jsonl").write_text("".join(prompts))
    model = save("qwen3", folder / "model")
    make("qwen3", seed=0).save_pretrained(model)
    job: dict[str, Any] = simulated_job(batch_groups=4)
    job["spec"]["model"] = {"path": {"directory": str(model)}}
    job["spec"]["task"]["sampling"] = {"maxTokens": 24}
    job["spec"]["generators"][0]["engine"] = {"vllm": {"maxConcurrency": 8, "kvCacheBytes": "64Mi"}}
    job["spec"]["trainer"] = {"microBatchTokens": 512}
    path = folder / "job.yaml"
    path.write_text(json.dumps(job))
    return path
