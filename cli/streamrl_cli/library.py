"""`import streamrl`: jobs and runs from Python, by the same runner as `streamrl run`.

        load(file) / Job(RLJob) ──run()──▶ run folder ◀── metrics, journal, samples ── process of `streamrl run --resume`
                                               │
              events, metrics, samples, result ◀┘  (read, never written)

Owns what a script or a notebook sees of a run. Does not own how a job runs: that is a process of its own, so that a script's signals, threads and
umask stay as they are, and a run goes on or ends as it does from a terminal.
"""

import atexit
import html
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Self

from streamrl import keys
from streamrl.errors import UserError, UserErrors
from streamrl.spec import RLJob, parse_job
from streamrl_cli import console
from streamrl_cli.jobfile import base_dir_of, load_job
from streamrl_cli.local import run_problems
from streamrl_cli.reporting.samples import of_run
from streamrl_cli.runner.folder import DEFAULT_PARENT, RunFolder, create_folder, open_folder, private_files
from streamrl_cli.runner.workers import RunFailedError, last_line
from streamrl_workers.metrics.jsonl import LineReader

if TYPE_CHECKING:
    import pandas
    import pyarrow

LOG = "streamrl-run.log"
"""In the folder's logs: what `streamrl run` prints."""
_POLL_S = 0.2
"""Between two reads of the metrics, which are some hundred bytes a step."""
_SHOWN_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A step that was trained, or an evaluation: one line of the run's metrics."""

    kind: Literal["step", "evaluation"]
    step: int
    data: Mapping[str, Any]
    """The line whole: `docs/reference/steps.md` lists its fields."""


class Metrics(list[dict[str, Any]]):
    """Rows of `steps.jsonl` in the order of steps, one dict a step. Nested values have dotted names (`trainer.loss`)."""

    def arrow(self) -> "pyarrow.Table":
        """Return them as an Arrow table. Raises `UserError`: pyarrow is not installed."""
        table: pyarrow.Table = _module("pyarrow").Table.from_pylist(self._rows())
        return table

    def pandas(self) -> "pandas.DataFrame":
        """Return them as a data frame. Raises `UserError`: pandas is not installed."""
        frame: pandas.DataFrame = _module("pandas").DataFrame(self._rows())
        return frame

    def _rows(self) -> list[dict[str, Any]]:
        names = dict.fromkeys(name for row in self for name in row)
        return [{name: row.get(name) for name in names} for row in self]


@dataclass(frozen=True, slots=True)
class Job:
    """A job that is valid on this machine.

    Args:
        job: the job, as its file says it.
        base_dir: where relative paths and the user's modules of the job begin.

    Raises:
        UserErrors: what this machine cannot run.
    """

    job: RLJob
    base_dir: Path = field(default_factory=Path)

    def __post_init__(self) -> None:
        if problems := run_problems(self.job, base_dir=self.base_dir):
            raise UserErrors(problems)

    def run(self, folder: str | Path | None = None) -> "Run":
        """Start the job in a process of its own and return at once.

        Args:
            folder: a new or empty folder, or that of a run without a step; None: `runs/<job>-<time>`, as `streamrl run` names it.

        Raises:
            UserError: the folder cannot be used.
        """
        with private_files():
            made = create_folder(
                self.job, base_dir=self.base_dir, parent=DEFAULT_PARENT, path=None if folder is None else Path(folder)
            )
            return Run._started(made)


class Run:
    """A run and its folder. Iterating gives its events, from the first, until the run has ended.

    A `KeyboardInterrupt` (Ctrl-C, a notebook's stop button) while its end or events are waited for stops the run as Ctrl-C stops
    `streamrl run`: the trainer writes a checkpoint first, and `resume` goes on from it. So does the end of Python.
    """

    def __init__(self, folder: RunFolder, process: "subprocess.Popen[bytes] | None" = None) -> None:
        self._folder = folder
        self._process = process

    @classmethod
    def _started(cls, folder: RunFolder) -> Self:
        command = (sys.executable, "-m", "streamrl_cli.main", "run", "--plain", "--resume", str(folder.path))
        with folder.file(keys.DIR_LOGS, LOG).open("ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        run = cls(folder, process)
        atexit.register(run.stop)
        return run

    @property
    def folder(self) -> Path:
        """The run folder, which every command of `streamrl` takes."""
        return self._folder.path

    @property
    def job(self) -> RLJob:
        """The job as the folder holds it."""
        return self._folder.job

    def __iter__(self) -> Iterator[Event]:
        readers: tuple[tuple[Literal["step", "evaluation"], LineReader], ...] = (
            ("step", LineReader(path=self._folder.file(keys.DIR_METRICS, "steps.jsonl"))),
            ("evaluation", LineReader(path=self._folder.file(keys.DIR_METRICS, "evaluations.jsonl"))),
        )
        with self._stopped_by_interrupt():
            while True:
                has_ended = not self.is_running  # asked first: lines that came before the end are read below
                new = [(kind, line) for kind, reader in readers for line in reader.new_lines()]
                for kind, line in sorted(new, key=lambda one: one[1]["time_s"]):
                    yield Event(kind=kind, step=int(line["step"]), data=line)
                if has_ended:
                    break
                time.sleep(_POLL_S)
        self._check()

    @property
    def is_running(self) -> bool:
        """Whether the process that this object started is still there."""
        return self._process is not None and self._process.poll() is None

    def wait(self) -> dict[str, Any]:
        """Wait for the end; returns what `result.json` says.

        Raises:
            RunFailedError: the run has failed, or was stopped before its last step. The text is the line that says why.
        """
        if self._process is not None:
            with self._stopped_by_interrupt():
                self._process.wait()
        self._check()
        return self._folder.result() or {}

    @property
    def result(self) -> dict[str, Any]:
        """As `wait`."""
        return self.wait()

    def stop(self) -> None:
        """Stop it, and wait until the trainer has written a checkpoint. `resume` goes on."""
        if self._process is not None and self.is_running:
            self._process.send_signal(signal.SIGINT)
            self._process.wait()

    def resume(self) -> "Run":
        """Go on, in a new process, with a run that was stopped or has failed."""
        with private_files():
            return Run._started(self._folder)

    @property
    def metrics(self) -> Metrics:
        """One row for each step that has been trained until now."""
        lines = LineReader(path=self._folder.file(keys.DIR_METRICS, "steps.jsonl")).new_lines()
        steps = {int(line["step"]): dict(_flat(line)) for line in lines}  # a step trained again replaces the first
        return Metrics(steps[step] for step in sorted(steps))

    def samples(self) -> Iterator[dict[str, Any]]:
        """All samples that steps have consumed: texts, tokens, log-probs, rewards, advantages. As `streamrl samples --all --json`."""
        for sample in of_run(self.folder):
            yield sample.document()

    def watch(self) -> dict[str, Any]:
        """Show the run until its end, in place in a notebook and line by line elsewhere; returns as `wait`."""
        shown = None
        for event in self:
            if "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None:
                if shown is None:
                    shown = _module("IPython.display").display(self, display_id=True)
                else:
                    shown.update(self)
            else:
                console.out(f"{event.kind} {event.step + (event.kind == 'step')}: {_told(event)}")
        return self.wait()

    def _repr_html_(self) -> str:
        rows = self.metrics
        names = ("step", "reward_mean", "trainer.loss", "tokens_per_s", "length_mean")
        head = "".join(f"<th>{name}</th>" for name in names)
        body = "".join(
            f"<tr>{''.join(f'<td>{_cell(row.get(name))}</td>' for name in names)}</tr>" for row in rows[-_SHOWN_STEPS:]
        )
        return f"<p>{html.escape(self._state(steps=len(rows)))}</p><table><tr>{head}</tr>{body}</table>"

    def __repr__(self) -> str:
        return self._state(steps=len(self.metrics))

    def _state(self, *, steps: int) -> str:
        result = self._folder.result()
        state = "running" if self.is_running else result["status"] if result else "not ended"
        return f"<Run {self.folder} {state}, {steps} of {self.job.spec.pipeline.steps} steps>"

    @contextmanager
    def _stopped_by_interrupt(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            self.stop()
            raise

    def _check(self) -> None:
        """Raise `RunFailedError` where the run has ended otherwise than well."""
        if self._folder.has_succeeded:
            return
        code = None if self._process is None else self._process.returncode
        log = self._folder.file(keys.DIR_LOGS, LOG)
        said = last_line(log).removeprefix("streamrl: ") if log.exists() else f"{self.folder} has not ended"
        raise RunFailedError(said, exit_code=console.EXIT_INTERRUPTED if code is None else code)


def load(source: str | Path | Mapping[str, Any], *, base_dir: str | Path = ".", **settings: object) -> Job:
    """Read a job.

    Args:
        source: a file with one job, YAML or JSON, as for `streamrl run`; or the job itself, as such a file holds it.
        base_dir: where relative paths and the user's modules begin, of a job that is no file.
        settings: fields that replace a file's, by path: `load("job.yaml", **{"spec.pipeline.steps": 10})`.

    Raises:
        UserErrors: what is wrong, with file and line.
    """
    if isinstance(source, Mapping):
        return Job(parse_job(dict(source)), base_dir=Path(base_dir))
    overrides = [f"{path}={json.dumps(value)}" for path, value in settings.items()]
    return Job(load_job(Path(source), overrides=overrides), base_dir=base_dir_of(Path(source)))


def open_run(folder: str | Path) -> Run:
    """Open the folder of a run that has ended, or that another process runs. Raises `UserError`: it is none."""
    return Run(open_folder(Path(folder)))


def _flat(line: Mapping[str, Any], *, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in line.items():
        if isinstance(value, dict):
            yield from _flat(value, prefix=f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _told(event: Event) -> str:
    names = ("mean_reward",) if event.kind == "evaluation" else ("reward_mean", "tokens_per_s")
    return ", ".join(f"{name} {_cell(event.data.get(name))}" for name in names)


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else html.escape(str("–" if value is None else value))


def _module(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError:
        raise UserError(field=name, rule="is not installed", fix=f"pip install {name.partition('.')[0]}") from None
