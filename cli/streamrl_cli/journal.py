"""`streamrl journal check RUN`, `show RUN GROUP` and `repair RUN`: what a run's journal proves and tells.

check: the journal is what was written; every planned group is in exactly one step, or dropped with one
reason, or live; the newest checkpoint agrees. Exit code 0, or 1 with what is violated, or 2 where the
journal cannot be believed. check and show also work while the run goes on.
repair: groups whose stored samples are damaged are generated again; the run must have stopped.
"""

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path

from streamrl.errors import EXIT_DONE, EXIT_FAULT, UserError, UserErrors
from streamrl.keys import FILE_JOB
from streamrl.spec import read_job
from streamrl_cli import console

_SHOWN_VIOLATIONS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `streamrl journal`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="check|show|repair")
    check = actions.add_parser("check", help="prove that every group was trained exactly once")
    check.add_argument("run", type=Path, help="the run folder")
    show = actions.add_parser("show", help="tell one group's life, and why it is in no step")
    show.add_argument("run", type=Path, help="the run folder")
    show.add_argument("group", type=int, help="number of the group")
    repair = actions.add_parser("repair", help="give up damaged samples: their groups are generated again")
    repair.add_argument("run", type=Path, help="the run folder; nothing of the run may be running")


def run(args: argparse.Namespace) -> int:
    """Check, show or repair."""
    if args.action == "repair":
        return _repair(args.run)
    if args.action == "show":
        return _show(args.run, group_id=args.group)
    return _check(args.run)


def _check(run_dir: Path) -> int:
    from streamrl_workers.scheduler.journal.adoption import read_adopted
    from streamrl_workers.scheduler.journal.check import check_run, store_of

    report, adopted = check_run(run_dir), read_adopted(store_of(run_dir))
    dropped = ", ".join(f"{reason} {count}" for reason, count in report.dropped.items())
    console.out(f"planned    {report.planned} groups")
    before = "" if adopted is None else f", {adopted.step} of them taken over from {adopted.run}"
    console.out(f"consumed   {report.consumed} groups in {report.steps} steps{before}")
    console.out(f"dropped    {sum(report.dropped.values())} groups{': ' if dropped else ''}{dropped}")
    console.out(f"live       {report.live} groups; the run has {'ended' if report.ended else 'not ended'}")
    checkpoint = report.checkpoint
    console.out(f"checkpoint {f'{checkpoint.path} of attempt {checkpoint.attempt}' if checkpoint else 'none'}")
    for field, data in (report.fingerprint or {"none recorded": ""}).items():
        console.out(f"data       {field}{': ' if data else ''}{data}")
    for line in _verdict(report.violations):
        console.out(line)
    return EXIT_FAULT if report.violations else EXIT_DONE


def _verdict(violations: tuple[str, ...]) -> Iterator[str]:
    if not violations:
        yield "verdict    every group is accounted for exactly once"
        return
    yield f"verdict    VIOLATED in {len(violations)} cases"
    yield from (f"  {violation}" for violation in violations[:_SHOWN_VIOLATIONS])
    if len(violations) > _SHOWN_VIOLATIONS:
        yield f"  and {len(violations) - _SHOWN_VIOLATIONS} more"


def _show(run_dir: Path, *, group_id: int) -> int:
    from streamrl_workers.scheduler.journal.check import snapshot
    from streamrl_workers.scheduler.journal.integrity import DamagedJournalError
    from streamrl_workers.scheduler.journal.show import describe
    from streamrl_workers.scheduler.journal.tables import load
    from streamrl_workers.scheduler.settings import SchedulerSettings
    from streamrl_workers.scheduler.undelivered import delivery_of

    with snapshot(run_dir) as connection:
        for line in describe(connection, group_id):
            console.out(line)
        # What is damaged, and a job that this release refuses, is for `check` to say: a group's life is told all the same.
        with contextlib.suppress(DamagedJournalError, UserError, UserErrors):
            settings = SchedulerSettings.from_job(read_job(run_dir / FILE_JOB, beneath=run_dir).spec)
            if next_for_it := delivery_of(group_id, recovered=load(connection), settings=settings):
                console.out(next_for_it)
    return EXIT_DONE


def _repair(run_dir: Path) -> int:
    from streamrl.keys import DIR_CHECKPOINTS
    from streamrl_workers.scheduler.journal.check import CheckpointFact, repair, store_of
    from streamrl_workers.trainer.checkpoint import CheckpointStore

    found = CheckpointStore(store_of(run_dir) / DIR_CHECKPOINTS, keep_last=1).newest()
    checkpoint = None
    if found is not None:
        checkpoint = CheckpointFact(path=found.directory.name, step=found.meta.step, attempt=found.meta.attempt)
    done = repair(run_dir, checkpoint=checkpoint)
    console.out(f"{len(done.groups)} groups will be generated again{': ' if done.groups else ''}{_listed(done.groups)}")
    if done.first_step is not None:
        console.out(f"step {done.first_step} and the steps behind it will be taken anew")
    return EXIT_DONE


def _listed(groups: tuple[int, ...]) -> str:
    more = len(groups) - _SHOWN_VIOLATIONS
    return ", ".join(map(str, groups[:_SHOWN_VIOLATIONS])) + (f" and {more} more" if more > 0 else "")
