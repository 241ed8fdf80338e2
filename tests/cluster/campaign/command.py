"""`make campaign`: every case on one control plane, a line for each, and a line that runs a failed one again.

python -m cluster.campaign [--only NAME ...] [--kind crash|faults|spec ...] [--scenario NAME ...] [--seeds N] [--first SEED]
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from cluster.campaign import cases, spec_cases
from cluster.campaign.bench import Bench, open_bench
from cluster.campaign.cases import Book, Case, Result
from cluster.campaign.mistakes import POD_MISTAKES
from cluster.campaign.scenarios import SCENARIOS
from cluster.harness.base import Cluster
from cluster.harness.control_plane import open_cluster

AT_ONCE = 4
"""Cases under way at the same time: most of a case is waiting."""
SEEDS = 20
KINDS = ("crash", "faults", "spec")
SPEC = "spec"


async def run_named(cluster: Cluster, names: Sequence[str], *, at_once: int = AT_ONCE) -> list[Result]:
    """Run cases; results in the order in which they ended."""
    async with open_bench(cluster) as bench:
        return await _run(bench, Book(bench), names, at_once=at_once)


async def _run(bench: Bench, book: Book, names: Sequence[str], *, at_once: int) -> list[Result]:
    limit = asyncio.Semaphore(at_once)
    results: list[Result] = []

    async def one(name: str) -> None:
        async with limit:
            story, kind, number = name.split("/")
            if story == SPEC:
                result = await spec_cases.run(kind, int(number), bench=bench)
            else:
                case = Case(scenario=story, kind=kind, number=int(number))
                result = await cases.run(case, bench=bench, book=book)
            results.append(result)
            _tell(result, done=len(results), of=len(names))

    async with asyncio.TaskGroup() as tasks:
        for name in names:
            tasks.create_task(one(name), name=name)
    return results


def _tell(result: Result, *, done: int, of: int) -> None:
    notes = f"  ({'; '.join(result.notes)})" if result.notes else ""
    verdict = f"WRONG: {result.wrong}" if result.wrong else "ok"
    sys.stdout.write(f"{done}/{of} {result.name} {result.seconds:.1f} s {verdict}{notes}\n")
    if result.wrong:
        sys.stdout.write(f"    again: {again(result.name)}\n")
    sys.stdout.flush()


def again(name: str) -> str:
    """The command that runs a case again."""
    return f"make campaign ARGS='--only {name}'"


async def _campaign(cluster: Cluster, options: argparse.Namespace) -> list[Result]:
    async with open_bench(cluster) as bench:
        book = Book(bench)
        names = options.only or await _chosen(book, options)
        return await _run(bench, book, names, at_once=options.at_once)


async def _chosen(book: Book, options: argparse.Namespace) -> list[str]:
    """All cases that the options leave, by name."""
    seeds = range(options.first, options.first + options.seeds)
    scenarios = list(options.scenario or SCENARIOS) if set(options.kind) - {SPEC} else []
    calm = await asyncio.gather(*(book.of(scenario) for scenario in scenarios))
    names = []
    for scenario, undisturbed in zip(scenarios, calm, strict=True):
        sys.stdout.write(f"{scenario}: {len(undisturbed.writes)} writes\n")
        if "crash" in options.kind:
            names += cases.crashes(scenario, len(undisturbed.writes), kinds=options.crash)
        if "faults" in options.kind:
            names += [f"{scenario}/{cases.FAULTS}/{seed}" for seed in seeds]
    if SPEC in options.kind:
        names += [f"{SPEC}/pair/{seed}" for seed in seeds] + [f"{SPEC}/mistakes/{seed}" for seed in seeds]
        names += [f"{SPEC}/pod/{place}" for place in range(len(POD_MISTAKES))]
    return names


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make campaign", description=__doc__)
    parser.add_argument("--only", nargs="*", help="names of cases")
    parser.add_argument("--scenario", nargs="*", choices=SCENARIOS)
    parser.add_argument("--kind", nargs="*", default=KINDS, choices=KINDS)
    parser.add_argument("--crash", nargs="*", default=cases.CRASHES, choices=cases.CRASHES, help="kinds of crash")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="mixtures of faults for each scenario; pairs of specs")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--at-once", type=int, default=AT_ONCE)
    parser.add_argument("--json", type=Path, help="file for the results")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 1 where a case went wrong."""
    options, begun_s = _options(arguments), time.monotonic()
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
