"""A trainer without a scheduler, for commands that drive its engine themselves: its processes and their environment.

      COMMAND ══ rank 0: a process of the command      lines on its standard output ─▶ the command
              ══ rank 1, 2, ...: the trainer's own

Owns how they are started together, with the cores and GPUs that `streamrl run` would give them. Invariant: none outlives the block.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from streamrl import keys
from streamrl_cli.runner.folder import RunFolder
from streamrl_cli.runner.plan import LOOPBACK, ProcessPlan, plan_run, usable_cpus, visible_gpus
from streamrl_cli.runner.workers import child, free_port

_RANK = "streamrl_workers.trainer"
_NO_SCHEDULER = f"{LOOPBACK}:1"
"""A trainer's settings name one; here it is never dialled."""


@asynccontextmanager
async def start_lone_trainer(
    run: RunFolder, module: str, *arguments: str, model: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """All ranks of the job in `run`; rank 0 is `python -m module`, which meets the others by `ProcessGroup`. Gives rank 0."""
    ranks = plan_run(run.job.spec, cpus=usable_cpus(), gpus=visible_gpus()).ranks
    shared = {keys.ENV_MASTER_PORT: str(free_port()), keys.ENV_TOKEN: secrets.token_hex(32)}
    envs = [lone_environment(plan, run=run, model=model) | shared for plan in ranks]
    logs = [run.file(keys.DIR_LOGS, f"trainer-{rank}.log") for rank in range(len(ranks))]
    async with AsyncExitStack() as stack:
        for env, log in zip(envs[1:], logs[1:], strict=True):
            await stack.enter_async_context(child(_RANK, env=env, log=log, tells=False))
        yield await stack.enter_async_context(child(module, *arguments, env=envs[0], log=logs[0]))


def lone_environment(plan: ProcessPlan, *, run: RunFolder, model: str) -> dict[str, str]:
    """Of a worker that speaks with no scheduler."""
    return {
        **plan.env,
        keys.ENV_RUN_DIR: str(run.path),
        keys.ENV_MODEL_PATH: model,
        keys.ENV_CODE_DIR: str(run.base_dir),
        keys.ENV_SCHEDULER_ADDRESS: _NO_SCHEDULER,
        keys.ENV_TOKEN: "",
        keys.ENV_WEIGHTS_PORT: "0",
        keys.ENV_SIGNALS_PORT: "0",
    }
