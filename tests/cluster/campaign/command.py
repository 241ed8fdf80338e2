"""`make campaign`: every case on one control plane, a line for each, and a line that runs a failed one again.

python -m cluster.campaign [--only NAME ...] [--kind crash|faults|spec ...] [--seeds N] [--first SEED] [--at-once N]
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from cluster.campaign import cases
from cluster.campaign.bench import Bench, open_bench
from cluster.campaign.cases import Book, Case, Result
from cluster.campaign.scenarios import SCENARIOS
from cluster.harness.base import Cluster
from cluster.harness.control_plane import open_cluster

AT_ONCE = 4
"""Cases under way at the same time: most of a case is waiting."""
SEEDS = 20


async def run_all(cluster: Cluster, chosen: Iterable[Case], *, at_once: int = AT_ONCE) -> list[Result]:
    """Run cases; results in the order in which they ended."""
    async with open_bench(cluster) as bench:
        return await _run(bench, Book(bench), list(chosen), at_once=at_once)


async def _run(bench: Bench, book: Book, chosen: Sequence[Case], *, at_once: int) -> list[Result]:
    limit, results = asyncio.Semaphore(at_once), []

    async def one(case: Case) -> None:
        async with limit:
            result = await cases.run(case, bench=bench, book=book)
            results.append(result)
            _tell(result, done=len(results), of=len(chosen))

    async with asyncio.TaskGroup() as tasks:
        for case in chosen:
            tasks.create_task(one(case), name=case.name)
    return results


def _tell(result: Result, *, done: int, of: int) -> None:
    notes = f"  ({'; '.join(result.notes)})" if result.notes else ""
    verdict = f"WRONG: {result.wrong}" if result.wrong else "ok"
    sys.stdout.write(f"{done}/{of} {result.name} {result.seconds:.1f} s {verdict}{notes}\n")
    if result.wrong:
        sys.stdout.write(f"    again: make campaign ARGS='--only {result.name}'\n")
    sys.stdout.flush()


async def _campaign(cluster: Cluster, options: argparse.Namespace) -> list[Result]:
    async with open_bench(cluster) as bench:
        book = Book(bench)
        if options.only:
            chosen = [Case.of(name) for name in options.only]
        else:
            chosen = []
            for name in options.scenario or SCENARIOS:
                writes = (await book.of(name)).writes
                sys.stdout.write(f"{name}: {len(writes)} writes\n")
                if "crash" in options.kind:
                    chosen += cases.crashes(name, len(writes))
                if "faults" in options.kind:
                    chosen += cases.faults(name, range(options.first, options.first + options.seeds))
        return await _run(bench, book, chosen, at_once=options.at_once)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 1 where a case went wrong."""
    parser = argparse.ArgumentParser(prog="make campaign", description=__doc__)
    parser.add_argument("--only", nargs="*", help="names of cases")
    parser.add_argument("--scenario", nargs="*", choices=SCENARIOS)
    parser.add_argument("--kind", nargs="*", default=["crash", "faults"], choices=["crash", "faults"])
    parser.add_argument("--seeds", type=int, default=SEEDS, help="mixtures of faults for each scenario")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--at-once", type=int, default=AT_ONCE)
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args(arguments)
    begun_s = time.monotonic()
    with open_cluster() as cluster:
        cluster.apply_crds()
        results = asyncio.run(_campaign(cluster, options))
    wrong = [result for result in results if result.wrong]
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    taken_s = time.monotonic() - begun_s
    sys.stdout.write(f"{len(results)} cases in {taken_s:.0f} s, {len(wrong)} went wrong\n")
    for result in wrong:
        sys.stdout.write(f"  {result.name}: {result.wrong[:300]}\n")
    return 1 if wrong else 0
