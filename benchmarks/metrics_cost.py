"""What metrics cost: processor microseconds for each sample of the README's job, scraped as Prometheus does by default.

    python benchmarks/metrics_cost.py [--times 6]

Counting: what the scheduler counts of a step's samples and their rewards. Accounting: the walls of generator and trainer, told apart by part,
with a line a second in their bubble files. Scraping: the pages of the three processes of a run of the job by HTTP, every 15 s: what its processes use
more while they are asked than while they are not, by turns. Its engine and trainer only count time there, so that nothing else uses much; all that is
exported is set as in any run. Prometheus' own part is not counted.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from observability_cost import lines_of
from run_folders import EXAMPLE

from streamrl.keys import DIR_ENDPOINTS
from streamrl.metrics import GENERATOR, TRAINER, MetricTable, worker_labels
from streamrl.spec import RLJob
from streamrl_cli.jobfile import load_job
from streamrl_cli.reporting.comparison import mean
from streamrl_workers.metrics.bubbles import BubbleSink, Recorder, WallState
from streamrl_workers.metrics.signals import WallMetrics
from streamrl_workers.scheduler.records import SampleStats
from streamrl_workers.scheduler.server.metrics_endpoint import SchedulerMetrics
from streamrl_workers.scheduler.views import StepSummary

_TOKENS = 12
_SAMPLES_A_S = 350
"""Of the job on two cores."""
_SCRAPE_S = 15
_MAIN_JOB_S = 1.9e-3
"""Processor seconds of all processes for a sample of the job under way (`observability_cost.py`)."""
_STEPS, _SECONDS = 50, 200
_SLOTS = 128
_NOTES_A_STEP = 2
"""How often a generator says what it does, for each step of its engine."""
_BUSY_PART, _IDLE_PART = WallState(part="busy"), WallState(part="other")
_PROCESSES = ("scheduler", "trainer-0", "generator-local-0")
_CALM = (
    f"spec.generators=[{{name: local, engine: {{simulated: {{slots: {_SLOTS}, meanTokens: {_TOKENS}, latency: [{{batch: 1, milliseconds: 50}}]}}}}}}]",
    "spec.trainer.engine={simulated: {secondsPerStep: 2}}",
    "spec.pipeline.steps=1000000",
)
"""Changes of the job: engine and trainer count time."""
_BEGUN_STEPS = 3
_TURN_S = 10.0
_PAUSE_S = 0.02
"""Between two scrapes."""
_DEADLINE_S = 300.0


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=6)
    job, times = load_job(EXAMPLE), parser.parse_args().times
    counted = [1e6 * counting_s(job) for _ in range(times)]
    accounted = [1e6 * accounting_s(job) for _ in range(times)]
    with at_work() as run:
        scraped = [1e6 * scraping_s(run) / (_SCRAPE_S * _SAMPLES_A_S) for _ in range(times)]
    whole = [sum(three) for three in zip(counted, accounted, scraped, strict=True)]
    for name, values in {"counting": counted, "accounting": accounted, "scraping": scraped, "all": whole}.items():
        found = mean(values)
        assert found is not None
        share = found.value / (1e4 * _MAIN_JOB_S)
        print(f"{name}: {found.value:.1f} ± {found.half_width or 0:.1f} us a sample, {share:.2f} % of the main job's")


def counting_s(job: RLJob) -> float:
    """Processor seconds for a sample."""
    metrics, spec = SchedulerMetrics(job, process="scheduler"), job.spec
    groups, size = spec.pipeline.batch_groups, spec.task.group_size
    samples = groups * size
    stats = SampleStats(
        samples=samples,
        reward_sum=1.0,
        reward_count=samples,
        lengths=(_TOKENS,) * samples,
        turns_sum=samples,
        part_sums={},
    )
    step = StepSummary(
        attempt=1,
        step=0,
        stats=stats,
        tasks={},
        staleness_histogram={0: groups},
        trainer_metrics={"step_seconds": 1.0},
        reissued_samples=0,
        dropped_groups={},
        score_failures={},
    )
    begun_s = time.process_time()
    for _ in range(_STEPS):
        for _ in range(samples):
            metrics.reward_took("answer", 0.001)
        metrics.step_recorded(step)
    return (time.process_time() - begun_s) / (_STEPS * samples)


def accounting_s(job: RLJob) -> float:
    """Processor seconds for a sample: generator and trainer."""
    with tempfile.TemporaryDirectory() as scratch:
        generator = _recorder(job, Path(scratch), table=GENERATOR, role="generator")
        trainer = _recorder(job, Path(scratch), table=TRAINER, role="trainer")
        notes = round(_NOTES_A_STEP * _SAMPLES_A_S * _TOKENS / _SLOTS)
        begun_s = time.process_time()
        for _ in range(_SECONDS):
            for number in range(notes):
                generator.enter(_IDLE_PART if number % 2 else _BUSY_PART)
            with trainer.during(_BUSY_PART):
                pass
            for one in (generator, trainer):
                one.sample()
        used_s = time.process_time() - begun_s
        for one in (generator, trainer):
            one.close()
    return used_s / (_SECONDS * _SAMPLES_A_S)


def _recorder(job: RLJob, folder: Path, *, table: MetricTable, role: str) -> Recorder:
    sink = BubbleSink(folder / f"{role}.jsonl", process=f"{role}-0", role=role, instance="1")
    metrics = WallMetrics(table, common=worker_labels(job.metadata, role=role, process=f"{role}-0"))
    return Recorder(sink=sink, metrics=metrics)


@contextmanager
def at_work() -> Iterator[dict[str, psutil.Process]]:
    """A run that has made some steps: address of its metrics -> process."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        command = [sys.executable, "-m", "streamrl_cli.main", "run", str(EXAMPLE), "--plain", "--run-dir", str(folder)]
        flags = [part for change in _CALM for part in ("--set", change)]
        process = subprocess.Popen([*command, *flags], stdout=subprocess.DEVNULL)
        try:
            end_s = time.monotonic() + _DEADLINE_S
            while len(lines_of(folder)) < _BEGUN_STEPS:
                if process.poll() is not None or time.monotonic() > end_s:
                    raise SystemExit("the run makes no steps")
                time.sleep(1.0)
            yield dict(_endpoint(folder / DIR_ENDPOINTS / f"{name}.json") for name in _PROCESSES)
        finally:
            process.terminate()
            process.wait(_DEADLINE_S)


def _endpoint(file: Path) -> tuple[str, psutil.Process]:
    told = json.loads(file.read_text())
    return f"http://{told['signals']}/metrics", psutil.Process(told["pid"])


def scraping_s(run: dict[str, psutil.Process]) -> float:
    """Processor seconds of the run's processes for one scrape of all of them, beyond what they use anyhow."""
    begun_s, calm_s = time.monotonic(), _used_s(run.values())
    time.sleep(_TURN_S)
    a_second = (_used_s(run.values()) - calm_s) / (time.monotonic() - begun_s)
    begun_s, before_s, scrapes = time.monotonic(), _used_s(run.values()), 0
    while time.monotonic() < begun_s + _TURN_S:
        for url in run:
            _get(url)
        scrapes += 1
        time.sleep(_PAUSE_S)
    used_s = _used_s(run.values()) - before_s
    return (used_s - a_second * (time.monotonic() - begun_s)) / scrapes


def _used_s(processes: Iterable[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return float(sum(one.user + one.system for one in times))


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310 - the benchmark's own server
        return bytes(answer.read())


if __name__ == "__main__":
    main()
