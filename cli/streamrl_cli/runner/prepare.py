"""Makes the initial model ready before the workers start, in a process of its own (it needs torch).

A process that dies or freezes is started again under the job's failure policy, like a worker: what it has made is whole or absent.
"""

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from streamrl import keys
from streamrl_cli.runner.folder import RunFolder
from streamrl_cli.runner.unit import judge_exit
from streamrl_cli.runner.workers import child, failed
from streamrl_workers.process.heartbeat import child_environment, kill_when_frozen

PREPARE_TIMEOUT_S = 4 * 3600.0
"""A supervised warm-up of a large scratch model may take hours; a hung one must still end."""
_NAME = "prepare"


def cache_dir() -> Path:
    """`~/.cache/streamrl` (or under XDG_CACHE_HOME): warmed-up models by their hash."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "streamrl"


async def prepare_model(
    folder: RunFolder,
    *,
    report: Callable[[Mapping[str, Any]], None],
    say: Callable[[str], None],
    umask: int = -1,
    store: Path | None = None,
) -> str:
    """Build, warm up or resolve the job's model; returns the directory (or hub name) of model and tokenizer.

    `umask`: of the caches; -1: ours. `store`: directory of checkpoints of a run in pods; None: the run is a local one.

    Raises `RunFailedError`: the model or the task cannot be used; the text is the process's own line.
    """
    log, most = folder.file(keys.DIR_LOGS, f"{_NAME}.log"), folder.job.spec.failure_policy.max_restarts
    for restarts in range(most + 1):
        code, path = await _prepare_once(folder, log=log, report=report, umask=umask, store=store)
        if code == 0 and path is not None:
            return path
        verdict = judge_exit(
            name=_NAME, exit_code=code, run_ended=False, quick_deaths=restarts + 1, restarts=restarts, max_restarts=most
        )
        if code >= 0 or verdict.action == "fail":
            break
        say(f"{verdict.reason}; starting it again ({restarts + 1} of {most})")
        await asyncio.sleep(verdict.backoff_s)
    raise failed(reason=f"the model could not be made ready (exit code {code})", exit_code=code, log=log)


async def _prepare_once(
    folder: RunFolder,
    *,
    log: Path,
    report: Callable[[Mapping[str, Any]], None],
    umask: int,
    store: Path | None,
) -> tuple[int, str | None]:
    """Exit code of one process, and what it says the model's directory is."""
    heartbeat = child_environment(
        _NAME, environ={keys.ENV_HEARTBEAT_FILE: str(folder.file(keys.DIR_HEARTBEATS, "streamrl-run"))}
    )
    arguments = ("--job", str(folder.file(keys.FILE_JOB)), "--cache", str(cache_dir() / "models"))
    env = {**heartbeat, keys.ENV_CODE_DIR: str(folder.base_dir)}
    env |= {} if store is None else {keys.ENV_STORE_DIR: str(store)}
    async with child("streamrl_workers.models.prepare", *arguments, env=env, log=log, umask=umask) as process:
        watch = asyncio.create_task(
            kill_when_frozen(_NAME, environ=heartbeat, kill=process.kill), name="heartbeat of prepare"
        )
        try:
            async with asyncio.timeout(PREPARE_TIMEOUT_S):
                path = await _follow(process, report=report)
                return await process.wait(), path
        finally:
            watch.cancel()


async def _follow(process: asyncio.subprocess.Process, *, report: Callable[[Mapping[str, Any]], None]) -> str | None:
    assert process.stdout is not None
    path = None
    async for line in process.stdout:
        event = json.loads(line)
        report(event)
        if event.get("event") == "ready":
            path = str(event["path"])
    return path
