"""`streamrl run`: an RLJob on this machine, from the file to the report.

        job file ─▶ validate ─▶ run folder ─▶ initial model ─▶ SUPERVISOR(scheduler, trainer ranks, generators)
                                                    │                     │ metrics, journal, checkpoints
                                                    ▼                     ▼
                                                live view  ◀──────── run folder ──▶ report.html

Loops: `_show` reads progress once a second and draws it, and tells when there is none, until the supervisor is done. `_watch_silences` reads
notices of silent processes, from the preparation on, and writes what is new to the terminal. Ctrl-C asks the
supervisor to stop (the trainer writes a checkpoint first); a second Ctrl-C kills.
"""

import argparse
import asyncio
import json
import os
import secrets
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl import keys
from streamrl.errors import EXIT_DONE, EXIT_USER_ERROR, UserError
from streamrl.files import read_json
from streamrl.liveness import liveness_s
from streamrl.spec import RLJob
from streamrl_cli import console
from streamrl_cli.jobfile import add_overrides, base_dir_of, load_job
from streamrl_cli.local import unused_note
from streamrl_cli.runner.folder import (
    DEFAULT_PARENT,
    FILE_LOCK,
    RunFolder,
    create_folder,
    hold,
    newest_folder,
    open_code,
    private_files,
)
from streamrl_cli.runner.plan import plan_run, usable_cpus, visible_gpus
from streamrl_cli.runner.prepare import prepare_model
from streamrl_cli.runner.progress import RunProgress, StallWatch, format_number, format_seconds, held_out_losses
from streamrl_cli.runner.scaling import Scaler
from streamrl_cli.runner.supervisor import Supervisor, check_port
from streamrl_cli.runner.view import LiveView, PlainView
from streamrl_cli.runner.workers import RunFailedError
from streamrl_workers.scheduler.journal.adoption import adopt, check_steps_left, newest_of
from streamrl_workers.scheduler.journal.check import store_of
from streamrl_workers.stream.earlier_runs import trained_model

if TYPE_CHECKING:
    from streamrl_cli.reporting.data import RunData

REFRESH_S = 1.0
"""How often progress is read and drawn."""
STALL_BOUNDS = 10 / 3
"""No progress for so many times the bound for frozen processes (five minutes) is worth a line."""
NEWEST = "(newest)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `streamrl run`."""
    parser.add_argument(
        "file", nargs="?", type=Path, help="the RLJob; with --resume not needed, and compared with the run's own"
    )
    parser.add_argument(
        "--resume", nargs="?", const=NEWEST, metavar="RUN", help="go on with a run folder (default: the newest)"
    )
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="RUN",
        help="begin with weights, optimiser and steps of another run's newest checkpoint",
    )
    parser.add_argument(
        "--allow-changed-data", action="store_true", help="with --resume: go on although the data has changed"
    )
    parser.add_argument(
        "--weights-from",
        type=Path,
        metavar="RUN",
        help="begin with the trained model of a run that has ended, in place of spec.model, and count from step 0",
    )
    add_overrides(parser)
    parser.add_argument(
        "--run-dir",
        type=Path,
        help="folder of this run: new, empty, or of a run without a step (default: runs/<job>-<time>)",
    )
    parser.add_argument(
        "--grpc-port", type=int, default=0, help="the scheduler's port for generators and trainer (default: any)"
    )
    parser.add_argument(
        "--signals-port", type=int, default=0, help="the scheduler's port for metrics and numbers (default: any)"
    )
    parser.add_argument("--plain", action="store_true", help="plain lines instead of the live view")


def run(args: argparse.Namespace) -> int:
    """Run or resume a job; returns the exit code."""
    for flag, port in (("--grpc-port", args.grpc_port), ("--signals-port", args.signals_port)):
        check_port(port, flag=flag)
    bound_s = liveness_s(os.environ)
    with private_files() as umask:
        folder = _resumed(args) if args.resume else _created(args)
        with hold(folder.file(FILE_LOCK), run=str(folder.path)):
            if folder.has_succeeded:
                return _ended_already(folder)
            folder.file(keys.FILE_RESULT).unlink(missing_ok=True)  # it failed, and goes on now
            _allow_changed_data(folder, allowed=args.allow_changed_data)
            return asyncio.run(_Run(folder, args, liveness_s=bound_s, umask=umask).main())


def _created(args: argparse.Namespace) -> RunFolder:
    if args.file is None:
        raise UserError(field="FILE", rule="is required", fix="name a job file, or --resume a run")
    if args.allow_changed_data:
        raise UserError(field="--allow-changed-data", rule="goes with --resume: a new run takes the data as it is")
    if args.source and args.weights_from:
        raise UserError(field="--weights-from", rule="must not be given with --from", fix="leave one of them out")
    job = load_job(args.file, overrides=[*args.set, *_model_of(args.weights_from)])
    source = None if args.source is None else store_of(args.source)
    checkpoint = None if source is None else newest_of(source)
    if source is not None and checkpoint is not None:
        check_steps_left(
            checkpoint,
            steps=job.spec.pipeline.steps,
            source=source,
            weights_alone=f"--weights-from {args.source}",
        )
    folder = create_folder(job, base_dir=base_dir_of(args.file), parent=DEFAULT_PARENT, path=args.run_dir)
    if source is not None and checkpoint is not None:
        adopt(checkpoint, source=source, store=folder.path)
        console.out(f"goes on from step {checkpoint.step} of {args.source}")
    return folder


def _model_of(run: Path | None) -> list[str]:
    """Return the override by which a job trains the model that a run exported."""
    if run is None:
        return []
    directory = trained_model(store_of(run), field="--weights-from").resolve()
    return [f"spec.model={json.dumps({'path': {'directory': str(directory)}})}"]


def _ended_already(folder: RunFolder) -> int:
    """Report that a run has nothing left to do. Raises `UserError`: its job was given more steps since."""
    result, steps = folder.result() or {}, folder.job.spec.pipeline.steps
    more = f"streamrl run FILE --from {folder.path}"
    if steps > result.get("steps", steps):
        raise UserError(
            field=str(folder.file(keys.FILE_JOB)),
            rule=f"has more steps than the {result['steps']} with which the run has ended",
            got=steps,
            fix=f"go on from it in a new run: {more}",
        )
    console.out(
        f"{folder.path} has ended already, with all of its steps; `streamrl report {folder.path}` shows it, "
        f"`{more}` with more steps goes on from it"
    )
    return EXIT_DONE


def _resumed(args: argparse.Namespace) -> RunFolder:
    if (args.set and not args.file) or args.run_dir or args.source or args.weights_from:
        raise UserError(
            field="--resume",
            rule="goes on with the job as the run folder holds it",
            fix="leave out --set, --from, --weights-from and --run-dir, or start a new run",
        )
    folder = open_code(newest_folder(DEFAULT_PARENT) if args.resume == NEWEST else Path(args.resume))
    if args.file:
        _check_same_job(load_job(args.file, overrides=args.set), folder=folder, file=args.file)
    return folder


def _check_same_job(job: RLJob, *, folder: RunFolder, file: Path) -> None:
    """Raise `UserError`, which names the fields: the job file says something else than the job of the run."""
    from streamrl_cli.reporting.comparison import MOST_DIFFERENCES, set_fields

    here, there = set_fields(job.spec), set_fields(folder.job.spec)
    differing = [path for path in {**there, **here} if here.get(path) != there.get(path)]
    if differing:
        values = [(path, here.get(path, "not set"), there.get(path, "not set")) for path in differing]
        said = [f"spec.{path} is {new:.80}, there {old:.80}" for path, new, old in values[:MOST_DIFFERENCES]]
        said += [f"{len(values) - MOST_DIFFERENCES} more fields"] if len(values) > MOST_DIFFERENCES else []
        raise UserError(
            field=str(file),
            rule=f"differs from the job of {folder.path}: {'; '.join(said)}",
            fix="leave FILE out to go on with the job as the run has it, or start a new run",
        )


def _allow_changed_data(folder: RunFolder, *, allowed: bool) -> None:
    """Leave word for the scheduler, or remove that of an earlier start."""
    file = folder.file(keys.FILE_ALLOW_CHANGED_DATA)
    if allowed:
        file.touch()
    else:
        file.unlink(missing_ok=True)


class _Run:
    """One invocation of `streamrl run` on a run folder."""

    def __init__(self, folder: RunFolder, args: argparse.Namespace, *, liveness_s: float, umask: int) -> None:
        self.folder = folder
        self.args = args
        self.liveness_s = liveness_s
        self.umask = umask
        """The user's own: of caches that are shared, and of what the user's functions write."""
        self.progress = RunProgress(folder=folder)
        self.view = self._make_view()
        self.supervisor: Supervisor | None = None
        self.interrupts = 0
        self.stopper: asyncio.Task[None] | None = None
        self.is_dear = False
        """Whether it was said that the run costs too much."""
        self.ends_for_cost = ""
        """What is to be done first, where it ends for that."""

    def _make_view(self) -> PlainView | LiveView:
        if self.args.plain or not sys.stdout.isatty():
            return PlainView(self.progress, say=console.out)
        from rich.console import Console

        return LiveView(self.progress, console=Console())

    async def main(self) -> int:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt, task)
        try:
            with self.view:
                self.view.say(f"run folder: {self.folder.path}")
                if note := unused_note(self.folder.job):
                    self.view.say(note)
                watch = asyncio.create_task(self._watch_silences(), name="notices of silent processes")
                try:
                    await self._work()
                finally:
                    watch.cancel()
        except asyncio.CancelledError:
            return self._interrupted()
        except RunFailedError as failure:
            console.err(f"streamrl: {failure}")
            return failure.exit_code
        if self.stopper is not None and not self.folder.has_succeeded:
            return self._interrupted()
        if not self.folder.has_succeeded:
            result = read_json(self.folder.file(keys.FILE_RESULT), beneath=self.folder.path)
            console.err(f"streamrl: {result['reason']}")
            return EXIT_USER_ERROR
        self._summarise()
        return EXIT_DONE

    async def _work(self) -> None:
        spec = self.folder.job.spec
        report, say = self.view.prepare, self.view.say
        model = await prepare_model(self.folder, report=report, say=say, umask=self.umask) if spec.has_model else ""
        supervisor = self.supervisor = Supervisor(
            self.folder,
            plan=plan_run(spec, cpus=usable_cpus(), gpus=visible_gpus(), signals_port=self.args.signals_port),
            shared_env=self._shared_env(model),
            max_restarts=spec.failure_policy.max_restarts,
            liveness_s=self.liveness_s,
            say=self.view.say,
        )
        scaler = Scaler(
            folder=self.folder,
            pools=spec.pools,
            resize=lambda pool, replicas: supervisor.resize(pool, replicas=replicas),
            say=self.view.say,
        )
        shower = asyncio.create_task(self._show(), name="show progress")
        try:
            await supervisor.run(replicas=scaler.initial(), scaling=scaler.run)
        finally:
            shower.cancel()
            with suppress(asyncio.CancelledError):
                await shower
            await self._refresh()

    def _shared_env(self, model: str) -> dict[str, str]:
        return {
            keys.ENV_RUN_DIR: str(self.folder.path),
            keys.ENV_TOKEN: secrets.token_hex(32),
            keys.ENV_MODEL_PATH: model,
            keys.ENV_CODE_DIR: str(self.folder.base_dir),
            keys.ENV_UMASK: f"{self.umask:o}",
            keys.ENV_GRPC_PORT: str(self.args.grpc_port),
            keys.ENV_WEIGHTS_PORT: "",  # on one machine there is no link to spare
            keys.ENV_SIGNALS_PORT: "0",
        }

    async def _show(self) -> None:
        stalls = StallWatch(first_s=STALL_BOUNDS * self.liveness_s, looked_s=time.monotonic())
        while True:
            await self._refresh()
            line = stalls.look(self.progress.status, now_s=time.monotonic(), step_s=self.progress.step_s())
            if line:
                self.view.say(line)
            await asyncio.sleep(REFRESH_S)

    async def _watch_silences(self) -> None:
        while True:
            for text in self.progress.silence_lines():
                self.view.say(text)
            await asyncio.sleep(REFRESH_S)

    async def _refresh(self) -> None:
        """Show what is new, and say what a person should look at."""
        steps, evaluations = await self.progress.refresh()
        self.view.update(steps, evaluations)
        for text in (
            *self.progress.warnings(steps),
            *self.progress.tracker_warnings(),
            *self.progress.score_error_lines(),
        ):
            self.view.say(text)
        self._look_at_cost()

    def _look_at_cost(self) -> None:
        """Once the run has cost what it may: say so, and end it where the job says that."""
        bound = self.folder.job.spec.max_cost
        cost = self.progress.status.get("cost")
        if self.is_dear or bound is None or cost is None or cost < float(bound.amount):
            return
        self.is_dear = True
        line = f"the run has cost {format_number(cost)}, spec.maxCost.amount is {bound.amount}"
        if bound.action == "Warn":
            self.view.say(f"warning: {line}")
        else:
            self.ends_for_cost = f"{line}; raise it in {self.folder.file(keys.FILE_JOB)}, then "
            self._stop(f"{line}; stopping: the trainer writes a checkpoint")

    def _interrupt(self, task: asyncio.Task[int]) -> None:
        self.interrupts += 1
        if self.supervisor is None or self.interrupts > 1:
            task.cancel()
        else:
            self._stop("stopping: the trainer writes a checkpoint (Ctrl-C again to kill)")

    def _stop(self, line: str) -> None:
        if self.supervisor is not None and self.stopper is None:
            self.view.say(line)
            self.stopper = asyncio.create_task(self.supervisor.stop(), name="stop the run")

    def _interrupted(self) -> int:
        kept = sorted(self.folder.file(keys.DIR_CHECKPOINTS).glob("step-*[0-9]"))
        where = f"checkpoint at step {int(kept[-1].name.removeprefix('step-'))}" if kept else "no checkpoint yet"
        console.out(f"stopped ({where}); {self.ends_for_cost}go on with: streamrl run --resume {self.folder.path}")
        return console.EXIT_INTERRUPTED

    def _summarise(self) -> None:
        from streamrl_cli.reporting.data import read_run
        from streamrl_cli.reporting.report import bubbles_line, write_report

        data = read_run(self.folder.path)
        took = format_seconds(data.steps[-1]["elapsed_s"] if data.steps else None)
        console.out(f"done: {data.taken} steps in {took}{_held_out(data)}")
        if data.lost_lines:
            console.err(f"warning: {data.lost_lines}")
        console.out(f"check: {_check_line(self.folder)}")
        console.out(f"wall, weighted by cost: {bubbles_line(data)}")
        console.out(f"report: {write_report(data)}")
        if self.folder.file(keys.DIR_EXPORT).is_dir():
            console.out(f"model:  {self.folder.file(keys.DIR_EXPORT)}")


def _held_out(data: "RunData") -> str:
    """From the first evaluation to the last: reward, where there were generators; loss, of a supervised run."""
    parts = []
    if data.evaluations:
        first, last = data.evaluations[0], data.evaluations[-1]
        parts.append(f", held-out reward {_from_to(first['mean_reward'], last['mean_reward'])}")
        if last.get("sampled_reward") is not None:
            parts.append(f" (sampled {_from_to(first.get('sampled_reward'), last['sampled_reward'])})")
    if losses := held_out_losses(data.steps):
        parts.append(f", held-out loss {_from_to(losses[0], losses[-1])}")
    return "".join(parts)


def _from_to(first: float | None, last: float | None) -> str:
    return f"{format_number(first)} -> {format_number(last)}"


def _check_line(folder: RunFolder) -> str:
    """What the run's own check has found; a run with another finding has failed."""
    found = read_json(folder.file(keys.FILE_RESULT), beneath=folder.path)["check"]
    dropped = sum(found["dropped"].values())
    return f"{found['planned']} groups planned, {found['consumed']} trained exactly once, {dropped} dropped"
