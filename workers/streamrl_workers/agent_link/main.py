"""The process that links an agent host to the scheduler.

```
  SCHEDULER ══ Agents (gRPC) ══ LINK ── socket of both containers ──▶ tasks/host.py ──▶ fork server ──▶ agent host ──▶ programs
                                  └──── on one machine ─────────────────────────────▶ fork server ──▶ ...
```
Loops: the link's reader and writer (`link.py`), the host's slot (`tasks/worker_slots.py`), the signals port. The first that ends, ends
the process.

SIGTERM: what is asked is answered, nothing more is taken (`process/shutdown.py`). SIGINT, or a second SIGTERM: end now. In a pod
(STREAMRL_STAY) it stays when the scheduler has stopped it, until SIGTERM.

Owns: wiring, exit codes (0 stopped by the scheduler, or left; 2 user error; 75 scheduler or agent host lost, or ended now).
Invariant: it runs no code of the user's; what it holds, others can have again.
"""

import asyncio
import os
import signal
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from streamrl import names
from streamrl.errors import EXIT_DONE, EXIT_RETRY, EXIT_USER_ERROR, UserError, UserErrors
from streamrl.keys import (
    ENV_CODE_DIR,
    ENV_MODEL_PATH,
    ENV_POD_NAME,
    ENV_PROCESS,
    ENV_RUN_DIR,
    ENV_SCHEDULER_ADDRESS,
    ENV_SIGNALS_PORT,
    ENV_TASKS_SOCKET,
)
from streamrl.spec import RLJob, read_job
from streamrl.spec.task import AgentSpec
from streamrl.text import log_to_stderr, say
from streamrl_workers.agent_link.link import AgentLink
from streamrl_workers.metrics.signals import Signals, SignalsServer
from streamrl_workers.process.environment_variables import (
    WorkerVariables,
    job_file,
    port,
    required,
    worker_variables,
)
from streamrl_workers.process.shutdown import GracefulShutdown, first_of, live, watch_parent
from streamrl_workers.process.silences import hosted_folders
from streamrl_workers.stream.channel import SchedulerLostError
from streamrl_workers.stream.messages import ProtocolError, RefusedError
from streamrl_workers.stream.model_files import fetch_model
from streamrl_workers.stream.run_folder import write_endpoint
from streamrl_workers.stream.scheduler_link import SchedulerAddress
from streamrl_workers.tasks.fork_server import ForkServer
from streamrl_workers.tasks.pool import MEMORY_LIMIT_BYTES
from streamrl_workers.tasks.protocol import SPAWN_AGENT_HOST
from streamrl_workers.tasks.values import TaskPoolError
from streamrl_workers.tasks.worker_slots import PoolProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLinkSettings:
    """What the environment and the job say."""

    run_dir: Path
    code_dir: Path
    """Where programs run, as the agent host sees it."""
    process: str
    job: RLJob
    agent: AgentSpec
    scheduler: SchedulerAddress
    signals_port: int
    model_path: str | None
    host: Path | None
    """Socket of the container with the agent host; None: it is our child."""
    variables: WorkerVariables


def read_settings(environ: Mapping[str, str]) -> AgentLinkSettings:
    """Of this process.

    Raises:
        UserError, UserErrors: something is missing or wrong.
    """
    run_dir = Path(required(environ, ENV_RUN_DIR))
    job = read_job(job_file(environ, run_dir=run_dir))
    agent = job.spec.task.agent
    if agent is None or agent.pool is None:
        raise UserError(field="spec.task.agent.pool", rule="must be there: this process is of that pool")
    variables, host = worker_variables(environ), environ.get(ENV_TASKS_SOCKET)
    address = required(environ, ENV_SCHEDULER_ADDRESS)
    return AgentLinkSettings(
        run_dir=run_dir,
        code_dir=Path(required(environ, ENV_CODE_DIR)),
        process=environ.get(ENV_PROCESS) or _name_in_pod(environ),
        job=job,
        agent=agent,
        scheduler=SchedulerAddress(scheduler=address, token=variables.token, tls=variables.tls),
        signals_port=port(environ, ENV_SIGNALS_PORT),
        model_path=environ.get(ENV_MODEL_PATH) or None,
        host=Path(host) if host else None,
        variables=variables,
    )


def _name_in_pod(environ: Mapping[str, str]) -> str:
    """`agents-<ordinal>` of the pod `<job>-agents-<ordinal>`; without a pod the name must be given."""
    pod = environ.get(ENV_POD_NAME)
    if not pod:
        return required(environ, ENV_PROCESS)
    owner, _, ordinal = pod.rpartition("-")
    if not owner.endswith(f"-{names.AGENTS}") or not (ordinal.isascii() and ordinal.isdigit()):
        raise UserError(field=ENV_POD_NAME, rule=f"must end with -{names.AGENTS}-<ordinal>", got=pod)
    return f"{names.AGENTS}-{int(ordinal)}"


def main() -> int:
    """Run a link as the environment says; returns the exit code."""
    log_to_stderr()
    try:
        watch_parent(os.environ)
        return asyncio.run(_life(read_settings(os.environ)))
    except (UserError, UserErrors) as error:
        say(*error.lines)
        return EXIT_USER_ERROR
    except (SchedulerLostError, TaskPoolError) as error:
        say(str(error))
        return EXIT_RETRY
    except (RefusedError, ProtocolError) as error:
        say(f"scheduler and agent host do not agree: {error}")
        return EXIT_RETRY


async def _life(settings: AgentLinkSettings) -> int:
    """Until the process ends: its work, and what follows it in a pod."""
    return await live(
        _run(settings),
        stays=settings.variables.serve_until_told,
        run_dir=settings.run_dir,
        process=settings.process,
        host=settings.variables.bind_host,
        port=settings.signals_port,
    )


async def _run(settings: AgentLinkSettings) -> GracefulShutdown:
    """The work, until the scheduler stops it or somebody asks for its end."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: os._exit(EXIT_DONE))
    link: AgentLink | None = None
    signals = SignalsServer(
        Signals(
            metrics=lambda: b"",
            status=lambda: link.numbers if link else {},
            fault=lambda: link.ill() if link else "starting",
        )
    )
    host = settings.variables.bind_host
    bound = await signals.start(host=host, port=settings.signals_port)
    forks = _ForkServers(settings, model_path=await _model_path(settings))
    try:
        link = AgentLink(
            settings.scheduler,
            host_id=settings.process,
            instance=uuid.uuid4().hex,
            process=PoolProcess(SPAWN_AGENT_HOST, fork_server=forks.living),
            timeout_s=settings.agent.timeout_seconds,
            sessions=settings.agent.sessions,
            heartbeats=hosted_folders(os.environ),
        )
        write_endpoint(settings.run_dir, process=settings.process, signals=f"{host}:{bound}")
        shutdown = GracefulShutdown(leave=link.leave)
        shutdown.listen(asyncio.get_running_loop())
        await first_of(link=link.run(), host=link.run_host(), shutdown=shutdown.wait())
        return shutdown
    finally:
        await forks.close()
        await signals.close()


async def _model_path(settings: AgentLinkSettings) -> str:
    """Where the chat template's tokenizer is; in a pod the other container reads it at the same place, and cannot write there."""
    if settings.model_path is not None or settings.job.spec.task.chat is None:
        return settings.model_path or ""
    return str(await fetch_model(settings.scheduler, run_dir=settings.run_dir))


class _ForkServers:
    """The living fork server, one after the other."""

    def __init__(self, settings: AgentLinkSettings, *, model_path: str) -> None:
        self._settings = settings
        self._model_path = model_path
        self._newest: ForkServer | None = None

    async def living(self) -> ForkServer:
        """Start one where there is none. Raises `TaskPoolError`, `UserError`."""
        if self._newest is not None and self._newest.alive:
            return self._newest
        await self.close()
        self._newest = ForkServer(
            self._settings.job,
            base_dir=self._settings.code_dir,
            memory_limit_bytes=MEMORY_LIMIT_BYTES,
            host=self._settings.host,
            only_agents=True,
            model_path=self._model_path,
        )
        await self._newest.start()
        return self._newest

    async def close(self) -> None:
        """End it."""
        if self._newest is not None:
            await self._newest.close()
            self._newest = None
