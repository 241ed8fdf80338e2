"""`streamrl samples RUN|JOB`: looks at what a run generated, also while it runs.

Shows samples of one step, the newest that has been taken unless `--step` names another: the best, the worst, the longest and one
at random. `--group` shows one group whole, `--dropped` picks among the groups that were dropped. Samples come from the
archive (`storage.archive` of the job) and, for the newest steps, from the journal. Of a job of a cluster the same command is run
in its scheduler's container, where they lie, as `kubectl exec` would: prompts and answers are on no port. Of a job that has ended that container is
gone, and a pod of the user's own stands in for it (`cluster/reader.py`).
"""

import argparse
import asyncio
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from streamrl import keys, names
from streamrl.errors import EXIT_DONE, UserError
from streamrl.spec import read_job
from streamrl_cli import console
from streamrl_cli.cluster import jobs, reader
from streamrl_cli.cluster.api import ApiClient, add_connection, connect
from streamrl_cli.reporting.samples import ShownSample, of_dropped, of_failed, of_group, of_run, of_step
from streamrl_operator.kube.kinds import POD, RLJOB
from streamrl_operator.planning.values import trainer_cluster
from streamrl_workers.stream.sample_choice import FAILED, KINDS

_TEXT_CHARS = 800
"""Of a prompt or a turn, where `--full` is not given."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `streamrl samples`."""
    parser.add_argument("run", metavar="RUN|JOB", help="a run folder, or the name of a job")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--step", type=int, metavar="N", help="samples of this step (default: the newest)")
    where.add_argument("--group", type=int, metavar="G", help="all samples of this group")
    where.add_argument("--all", action="store_true", help="all samples of all steps; with --json: rows of a data set")
    where.add_argument("--dropped", action="store_true", help="samples of groups that were dropped")
    for kind, text in KINDS.items():
        parser.add_argument(f"--{kind}", action="append_const", dest="kinds", const=kind, help=text)
    parser.add_argument(
        "--kind", action="append", dest="kinds", choices=tuple(KINDS), help=f"the same by name; {FAILED}: of all steps"
    )
    parser.add_argument("--count", type=int, default=1, metavar="N", help="samples of each kind (default: 1)")
    parser.add_argument("--full", action="store_true", help="texts whole, however long")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, with tokens and log-probs")
    add_connection(parser)


def run(args: argparse.Namespace) -> int:
    """Print the samples."""
    if args.count < 1:
        raise UserError(field="--count", rule="must be at least 1", got=args.count)
    run_dir = Path(args.run)
    if not run_dir.is_dir() and "/" not in args.run:
        return asyncio.run(show_job(args))
    kinds = tuple(args.kinds or KINDS)
    if args.all:
        _print(of_run(run_dir), args)
        return EXIT_DONE
    if args.group is not None:
        found = of_group(run_dir, group_id=args.group)
    elif args.dropped:
        found = of_dropped(run_dir, kinds=kinds, count=args.count)
    elif args.step is None and kinds == (FAILED,):
        found = of_failed(run_dir, count=args.count)
    else:
        found = of_step(run_dir, step=args.step, kinds=kinds, count=args.count)
    for note in _notes(run_dir, left_out=found.left_out):
        console.err(note)
    _print(found.samples, args)
    return EXIT_DONE


def _print(samples: Iterable[ShownSample], args: argparse.Namespace) -> None:
    for sample in samples:
        if args.json:
            console.out(json.dumps(sample.document(), allow_nan=False))
        else:
            console.out(*_lines(sample, most_chars=None if args.full else _TEXT_CHARS))


async def show_job(args: argparse.Namespace) -> int:
    """Print the samples of a job of a cluster."""
    flags = [f"--{name}={value}" for name in ("step", "group") if (value := getattr(args, name)) is not None]
    flags += [f"--{name}" for name in ("all", "dropped", "full", "json") if getattr(args, name)]
    flags += [f"--count={args.count}", *(f"--{kind}" for kind in args.kinds or ())]
    command = ["python", "-m", "streamrl_cli.main", "samples", names.DIR_RUN, *flags]
    async with connect(args) as cluster:
        job = await cluster.get(RLJOB, args.run)  # says so if there is none
        if at := trainer_cluster(job):
            rule, fix = (
                f"has its samples in member cluster {at}",
                f"there: kubectl exec {_pod(args)} -- {' '.join(command)}",
            )
            raise UserError(field=f"job {args.run}", rule=rule, fix=fix)
        if jobs.state(job) not in jobs.ENDED:
            return await _run_in(cluster, _pod(args), command)
        pod = await reader.start(cluster, job)
        try:
            await reader.wait_running(cluster, pod)
            return await _run_in(cluster, pod["metadata"]["name"], command)
        finally:
            async with connect(args) as again:  # a command in a pod takes the connection
                await again.delete(pod, POD)


def _pod(args: argparse.Namespace) -> str:
    return f"{names.trainer(args.run)}-0"


async def _run_in(cluster: ApiClient, pod: str, command: Sequence[str]) -> int:
    return await cluster.run_in(pod, names.CONTAINER_SCHEDULER, command, out=console.out, err=console.err)


def _notes(run_dir: Path, *, left_out: int) -> Iterator[str]:
    archive = read_job(run_dir / keys.FILE_JOB, beneath=run_dir).spec.storage.archive
    if not archive.share_percent:
        yield "storage.archive is off (sharePercent: 0): only the newest steps have samples, without texts"
    elif left_out:
        yield f"{left_out} groups are not in the archive: it could not take them (see the scheduler's log)"


def _lines(sample: ShownSample, *, most_chars: int | None) -> Iterator[str]:
    yield sample.title()
    yield f"  {sample.facts()}"
    for name, text in sample.texts():
        yield from _text(name, text, most_chars=most_chars)
    yield ""


def _text(name: str, text: str, *, most_chars: int | None) -> Iterator[str]:
    shown = text if most_chars is None else text[:most_chars]
    margin = f"  {name:<11}"
    for line in shown.split("\n"):
        yield f"{margin}| {line}"
        margin = " " * len(margin)
    if len(shown) < len(text):
        yield f"{margin}  {len(text) - len(shown)} more characters: --full"
