"""What metrics cost: processor microseconds for each sample of the README's job, scraped as Prometheus does by default.

    python benchmarks/metrics_cost.py [--times 6]

Counting: a step's samples and their rewards. Scraping: the pages of its three processes by HTTP, every 15 s; the client's part is counted too.
"""

import argparse
import asyncio
import time
import urllib.request

from run_folders import EXAMPLE

from streamrl.metrics import GENERATOR, SCHEDULER, TRAINER, worker_labels
from streamrl.spec import RLJob
from streamrl_cli.jobfile import load_job
from streamrl_cli.reporting.comparison import mean
from streamrl_pages.metrics import MetricSet
from streamrl_pages.server import EndpointServer, metrics_response
from streamrl_workers.scheduler.components import StepSummary
from streamrl_workers.scheduler.records import SampleStats
from streamrl_workers.scheduler.server.metrics_endpoint import SchedulerMetrics

_TOKENS = 12
_SAMPLES_A_S = 350
"""Of the job on two cores."""
_SCRAPE_S = 15
_MAIN_JOB_S = 1.9e-3
"""Processor seconds of all processes for a sample of the job under way (`observability_cost.py`)."""
_STEPS, _SCRAPES = 50, 100


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=6)
    job, times = load_job(EXAMPLE), parser.parse_args().times
    counted = [1e6 * counting_s(job) for _ in range(times)]
    scraped = [1e6 * asyncio.run(scraping_s(job)) / (_SCRAPE_S * _SAMPLES_A_S) for _ in range(times)]
    both = [sum(pair) for pair in zip(counted, scraped, strict=True)]
    for name, values in {"counting": counted, "scraping": scraped, "both": both}.items():
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


async def scraping_s(job: RLJob) -> float:
    """Processor seconds for the pages of the three processes."""
    pages = {}
    for role, table in {"scheduler": SCHEDULER, "generator": GENERATOR, "trainer": TRAINER}.items():
        made = MetricSet(table, common=worker_labels(job.metadata, role=role, process=f"{role}-0"))
        pages[f"/{role}"] = lambda made=made: metrics_response(made.render())
    server = EndpointServer(pages)
    port = await server.start(host="127.0.0.1", port=0)
    begun_s = time.process_time()
    for _ in range(_SCRAPES):
        for path in pages:
            await asyncio.to_thread(_get, f"http://127.0.0.1:{port}{path}")
    took_s = (time.process_time() - begun_s) / _SCRAPES
    await server.close()
    return took_s


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310 - the benchmark's own server
        return bytes(answer.read())


if __name__ == "__main__":
    main()
