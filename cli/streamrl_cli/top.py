"""`streamrl top RUN|JOB`: a run folder, or a job of a cluster, as it goes: drawn again every second until the run ends or Ctrl-C.

Shows what the live view of `streamrl run` shows. Of a job it reads the scheduler's page through the API server of the trainer's cluster where the
user may (`get` of `pods/proxy`; in a member with `--member-context`); else it shows what `streamrl status JOB` does. Where there is no terminal, and with `--once`, it is written once.
"""

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from streamrl import names
from streamrl.errors import EXIT_DONE, UserError
from streamrl.spec import parse_job
from streamrl.text import plain
from streamrl_cli.cluster.api import ApiClient, RetryDeadline, UnreachableError, add_connection, connect
from streamrl_cli.cluster.jobs import ENDED, describe, lost_members, pool_places, state
from streamrl_cli.cluster.members import add_member_contexts, members_of
from streamrl_cli.cluster.status import look
from streamrl_cli.runner.folder import RunFolder, open_folder
from streamrl_cli.runner.progress import RunProgress
from streamrl_cli.runner.view import run_panel
from streamrl_operator.kube.kinds import RLJOB

LEAST_INTERVAL_S = 0.2

Drawn = tuple[RenderableType, bool]
"""What is shown, and whether the run has ended."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("run", metavar="RUN|JOB", help="a run folder, or the name of a job")
    parser.add_argument("--once", action="store_true", help="show it once")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="between two looks (default: 1)")
    add_member_contexts(parser)
    add_connection(parser)


def run(args: argparse.Namespace) -> int:
    """Show the run."""
    if not args.interval >= LEAST_INTERVAL_S:
        raise UserError(field="--interval", rule=f"must be at least {LEAST_INTERVAL_S:g}", got=args.interval)
    if Path(args.run).is_dir():
        progress = RunProgress(folder=open_folder(Path(args.run)))
        asyncio.run(_show(lambda: _draw_folder(progress), args=args))
    elif "/" in args.run:
        raise UserError(field=args.run, rule="is no folder", fix="name a run folder, or a job without its namespace")
    else:
        asyncio.run(show_job(args))
    return EXIT_DONE


async def show_job(args: argparse.Namespace) -> None:
    """Show a job of a cluster."""
    async with connect(args) as cluster, members_of(await cluster.get(RLJOB, args.run), args) as members:
        await _show(_WatchedJob(args.run, cluster=cluster, members=members).draw, args=args)


async def _show(draw: Callable[[], Awaitable[Drawn]], *, args: argparse.Namespace) -> None:
    """Until the run has ended; once where nobody watches."""
    console = Console()
    shown, has_ended = await draw()
    if args.once or not console.is_terminal:
        console.print(shown)
        return
    with Live(shown, console=console, auto_refresh=False) as live:
        live.refresh()
        while not has_ended:
            await asyncio.sleep(args.interval)
            shown, has_ended = await draw()
            live.update(shown, refresh=True)


async def _draw_folder(progress: RunProgress) -> Drawn:
    await progress.refresh()
    return run_panel(progress), progress.folder.result() is not None


class _WatchedJob:
    """One job of a cluster, and what was seen of it."""

    def __init__(self, name: str, *, cluster: ApiClient, members: Mapping[str, ApiClient]) -> None:
        self._name = name
        self._cluster, self._members = cluster, members
        self._progress: RunProgress | None = None
        self._patience = RetryDeadline()
        self._drawn: Drawn = Text(), False

    async def draw(self) -> Drawn:
        """Look again; while the API server is silent the last picture stays, for a while."""
        try:
            self._drawn = await self._look()
            self._patience.answered()
        except UnreachableError as error:
            self._patience.bear(error)
            if not isinstance(self._drawn[0], Group):
                raise  # nothing was seen yet
        return self._drawn

    async def _look(self) -> Drawn:
        job = await self._cluster.get(RLJOB, self._name)
        has_ended = state(job) in ENDED
        there = job["spec"].get("trainer", {}).get("clusterName")
        at = self._cluster if there is None else self._members.get(there)
        pod = f"{names.trainer(self._name)}-0"
        page = None if has_ended or at is None else await at.page(pod, port=names.PORT_SIGNALS)
        if page is not None:
            if self._progress is None:
                meta = {key: job["metadata"][key] for key in ("name", "namespace")}
                parsed = parse_job({key: job[key] for key in ("apiVersion", "kind", "spec")} | {"metadata": meta})
                where = Path(f"{meta['namespace']}/{meta['name']}")
                self._progress = RunProgress(folder=RunFolder(path=where, job=parsed, base_dir=where))
            self._progress.take_page(page)
            lost = [Text(f"not reached: {plain(lost_members(job))}", style="yellow")] if lost_members(job) else []
            return Group(run_panel(self._progress, places=pool_places(job)), *lost), has_ended
        found = await look(self._name, cluster=self._cluster, members=self._members)
        lines = describe(job, pools=found["pools"], pods=found["pods"], events=found["events"], now=datetime.now(UTC))
        return Group(Panel(Text("\n".join(map(plain, lines))), border_style="cyan")), has_ended
