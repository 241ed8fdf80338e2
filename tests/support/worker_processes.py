"""Starts workers as the runner does, one by one: real processes, real gRPC, a run folder; no runner."""

import json
import os
import secrets
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamrl import keys
from streamrl.spec import parse_job
from streamrl_workers.metrics.jsonl import read_jsonl
from support.ports import free_port
from support.runs import DEADLINE_S, wait_for

MODULES = {"scheduler": "scheduler", "trainer": "trainer", "generator": "generator"}


@dataclass(slots=True)
class Workers:
    """The worker processes of one run folder."""

    folder: Path
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    scheduler_port: int = field(default_factory=free_port)
    """Its own also while no scheduler lives."""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @classmethod
    def prepare(cls, job: dict[str, Any], *, folder: Path) -> "Workers":
        """Write the job into a new run folder."""
        folder.mkdir(parents=True)
        document = parse_job(job).model_dump(mode="json", by_alias=True, exclude_none=True)
        (folder / keys.FILE_JOB).write_text(json.dumps(document))
        (folder / keys.DIR_LOGS).mkdir()
        return cls(folder)

    def start(
        self, process: str, *, pass_fds: tuple[int, ...] = (), prefix: tuple[str, ...] = (), **environment: str
    ) -> subprocess.Popen[bytes]:
        """Start one worker by its process name (`scheduler`, `trainer-0`, `generator-sim-0`). `prefix`: command that starts it."""
        kind = process.split("-", maxsplit=1)[0]
        endpoint = self.folder / keys.DIR_ENDPOINTS / f"{process}.json"
        endpoint.unlink(missing_ok=True)
        with self.log(process).open("ab") as log:
            child = subprocess.Popen(
                [*prefix, sys.executable, "-m", f"streamrl_workers.{kind}"],
                env=os.environ | self._environment(process) | environment,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                pass_fds=pass_fds,
            )
        self.processes[process] = child
        return child

    def _environment(self, process: str) -> dict[str, str]:
        port = self.scheduler_port if process == "scheduler" else 0
        return {
            keys.ENV_RUN_DIR: str(self.folder),
            keys.ENV_PROCESS: process,
            keys.ENV_POOL: "sim",
            keys.ENV_TOKEN: self.token,
            keys.ENV_GRPC_PORT: str(port),
            keys.ENV_SIGNALS_PORT: "0",
            keys.ENV_SCHEDULER_ADDRESS: f"127.0.0.1:{self.scheduler_port}",
            keys.ENV_MODEL_PATH: str(self.folder),
            keys.ENV_CODE_DIR: str(self.folder.parent),
        }

    def start_scheduler(self) -> subprocess.Popen[bytes]:
        """Start the scheduler and wait until it listens."""
        child = self.start("scheduler")
        self.endpoint("scheduler")
        return child

    def start_all(self, *, generators: int = 1) -> None:
        """Scheduler, trainer and generators."""
        self.start_scheduler()
        self.start("trainer-0")
        for number in range(generators):
            self.start(f"generator-sim-{number}")

    def endpoint(self, process: str) -> dict[str, Any]:
        """Where a worker listens."""
        path = self.folder / keys.DIR_ENDPOINTS / f"{process}.json"
        wait_for(lambda: path.exists() or self.ended(process), what=f"endpoint of {process}: {self.text(process)}")
        document: dict[str, Any] = json.loads(path.read_text())
        return document

    def ended(self, process: str) -> bool:
        """Whether it has ended."""
        return self.processes[process].poll() is not None

    def kill(self, process: str) -> None:
        """`kill -9`."""
        self.processes[process].kill()
        self.processes[process].wait(DEADLINE_S)

    def terminate(self, process: str) -> int:
        """SIGTERM; the exit code."""
        self.processes[process].send_signal(signal.SIGTERM)
        return self.wait(process)

    def wait(self, process: str) -> int:
        """Exit code of a worker."""
        try:
            return self.processes[process].wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{process} did not end: {self.text('scheduler')} {self.text(process)}") from None

    def numbers(self) -> dict[str, Any]:
        """The scheduler's `/numbers`."""
        document: dict[str, Any] = json.loads(self.page("numbers"))
        return document

    def page(self, name: str, *, process: str = "scheduler") -> str:
        """A page of a worker's signals port."""
        try:
            with urllib.request.urlopen(
                f"http://{self.endpoint(process)['signals']}/{name}", timeout=DEADLINE_S
            ) as response:
                return str(response.read().decode())
        except urllib.error.HTTPError as error:
            with error:
                return str(error.read().decode())

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Whole lines of a metrics file."""
        return list(read_jsonl(self.folder / keys.DIR_METRICS / name))

    def log(self, process: str) -> Path:
        """Its log file."""
        return self.folder / keys.DIR_LOGS / f"{process}.log"

    def text(self, process: str) -> str:
        """Its log."""
        return self.log(process).read_text() if self.log(process).exists() else ""

    def close(self) -> None:
        """End what still runs."""
        for child in self.processes.values():
            child.kill()
            child.wait(DEADLINE_S)
