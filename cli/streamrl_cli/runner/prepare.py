"""Makes the initial model ready before the workers start, in a process of its own (it needs torch)."""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from streamrl import keys
from streamrl_cli.runner.children import open_lifeline
from streamrl_cli.runner.failure import failed
from streamrl_cli.runner.folder import RunFolder

PREPARE_TIMEOUT_S = 4 * 3600.0
"""A supervised warm-up of a large scratch model may take hours; a hung one must still end."""
STREAM_LIMIT_BYTES = 2**20
"""Longest line that the process may print."""


def cache_dir() -> Path:
    """`~/.cache/streamrl` (or under XDG_CACHE_HOME): warmed-up models by their hash."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "streamrl"


async def prepare_model(folder: RunFolder, *, report: Callable[[Mapping[str, Any]], None]) -> str:
    """Build, warm up or resolve the job's model; returns the directory (or hub name) of model and tokenizer.

    Raises:
        RunFailedError: the model or the task cannot be used; the text is the process's own line.
    """
    log = folder.file(keys.DIR_LOGS, "prepare.log")
    with log.open("ab") as errors, open_lifeline() as lifeline:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "streamrl_workers.models.prepare"),
            *("--job", str(folder.file(keys.FILE_JOB)), "--cache", str(cache_dir() / "models")),
            # Some data sets of reasoning-gym iterate over sets of strings: their items follow the hash seed.
            env={
                **os.environ,
                keys.ENV_CODE_DIR: str(folder.base_dir),
                keys.ENV_LIFELINE_FD: str(lifeline),
                "PYTHONHASHSEED": "0",
            },
            pass_fds=(lifeline,),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            limit=STREAM_LIMIT_BYTES,
        )
        try:
            async with asyncio.timeout(PREPARE_TIMEOUT_S):
                path = await _follow(process, report=report)
                code = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    if code != 0 or path is None:
        raise failed(reason=f"the model could not be made ready (exit code {code})", exit_code=code, log=log)
    return path


async def _follow(process: asyncio.subprocess.Process, *, report: Callable[[Mapping[str, Any]], None]) -> str | None:
    assert process.stdout is not None
    path = None
    async for line in process.stdout:
        event = json.loads(line)
        report(event)
        if event.get("event") == "ready":
            path = str(event["path"])
    return path
