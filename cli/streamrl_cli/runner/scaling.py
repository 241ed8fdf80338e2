"""Keeps each pool at the size that its scaling policy asks for.

    scheduler's /numbers ──▶ SCALER ── policy (streamrl_operator.autoscaler, pure) ──▶ Supervisor.resize
                                └──▶ metrics/scaling.jsonl, a line for the eyes

Loop:
  run  consumes: the scheduler's status; produces: sizes; waits for: that, at most `STATUS_TIMEOUT_S`, and the
       next poll; unblocked by: the clock. Ended by its owner, `run.py`.

Invariants: level-triggered: every poll asks for the wanted size again, so what was missed once is done later. Without
numbers (the scheduler starts again) nothing changes. The file has one line for each change of a size and one for the
start; the same reason is never written twice in a row.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamrl import keys
from streamrl.spec.generators import GeneratorPool
from streamrl.spec.task import AgentPool
from streamrl_cli.runner.folder import RunFolder
from streamrl_cli.runner.progress import fetch_status
from streamrl_operator.autoscaler import decide
from streamrl_operator.autoscaler.values import ScalingState
from streamrl_workers.metrics.jsonl import JsonlFile

POLL_S = 2.0
"""How often a pool's size is decided on: heartbeats, which the decision rests on, come every few seconds."""
FILE_SCALING = "scaling.jsonl"
"""In `metrics/`: {"time_s", "pool", "from", "to", "reason"}; `from` 0 is the start of the run or of its resumption."""


@dataclass(slots=True, kw_only=True)
class Scaler:
    """Decides for all pools of a run whose size may change."""

    folder: RunFolder
    pools: Sequence[GeneratorPool | AgentPool]
    resize: Callable[[str, int], None]
    say: Callable[[str], None]

    def initial(self) -> dict[str, int]:
        """Pool -> replicas at the start."""
        return {pool.name: pool.scaling.initial for pool in self.pools}

    async def run(self) -> None:
        """Until cancelled."""
        elastic = [pool for pool in self.pools if pool.scaling.key != "static"]
        states = {pool.name: ScalingState(wanted=pool.scaling.initial) for pool in elastic}
        if not elastic:
            return
        with JsonlFile(self.folder.file(keys.DIR_METRICS, FILE_SCALING)) as file:
            for pool in elastic:
                self._record(file, pool=pool.name, sizes=(0, pool.scaling.initial), reason="initialReplicas")
            while True:
                await asyncio.sleep(POLL_S)
                status = await fetch_status(self.folder)
                for pool in elastic:
                    states[pool.name] = self._decide(pool, state=states[pool.name], status=status, file=file)

    def _decide(
        self, pool: GeneratorPool | AgentPool, *, state: ScalingState, status: Mapping[str, Any] | None, file: JsonlFile
    ) -> ScalingState:
        now_s = time.monotonic()
        decision, after = decide(pool, state=state, numbers=status, now_s=now_s)
        if decision.replicas != state.wanted:
            self._record(file, pool=pool.name, sizes=(state.wanted, decision.replicas), reason=decision.reason)
            self.say(f"pool {pool.name}: {state.wanted} -> {decision.replicas} replicas ({decision.reason})")
        elif decision.held and not state.held:
            self.say(f"pool {pool.name}: stays at {decision.replicas} replicas ({decision.held})")
        self.resize(pool.name, decision.replicas)
        return after

    def _record(self, file: JsonlFile, *, pool: str, sizes: tuple[int, int], reason: str) -> None:
        before, after = sizes
        file.append({"time_s": round(time.time(), 3), "pool": pool, "from": before, "to": after, "reason": reason})
