"""What a trainer process measures and shows of itself, on every rank.

Owns: bubble samples (a task), metrics, the read-only status endpoint, `endpoint` in the run folder. Does not own: how pages are
served (`metrics/signals.py`), the numbers of steps (callbacks).

Invariants: without its bubble samples a process does not go on: their error is the cause of its end. The last sample is lost if it
cannot be written; how the process ended stays as it is.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from streamrl.errors import UserError
from streamrl.keys import DIR_METRICS
from streamrl.metrics import TRAINER_RANK, MetricTable
from streamrl_workers.metrics.bubbles import BubbleSink, Recorder
from streamrl_workers.metrics.signals import Signals, SignalsServer, WallMetrics
from streamrl_workers.stream.run_folder import write_endpoint
from streamrl_workers.trainer.engines.engine import RetryError
from streamrl_workers.trainer.settings import TrainerSettings
from streamrl_workers.weights.deltas import DeltaStore

_ROLE = "trainer"
_GAUGE = "trainer_"
LOADING = "the model is being loaded"
"""Why a trainer that has just started is not healthy."""
log = logging.getLogger(__name__)


class TrainerStatus:
    """Measures and shows while the context lasts."""

    def __init__(self, settings: TrainerSettings, *, table: MetricTable = TRAINER_RANK) -> None:
        """`table`: of this rank; its gauges `trainer_<number>` are set from the numbers of that name."""
        self.instance = uuid.uuid4().hex  # new at every process start
        self._settings = settings
        self._gauges = [name for name in table.specs if name.startswith(_GAUGE)]
        self._numbers: Callable[[], Mapping[str, Any]] = lambda: {
            name.removeprefix(_GAUGE): None for name in self._gauges
        }
        self._fault: Callable[[], str] = lambda: LOADING
        self.totals: Callable[[], Mapping[str, float]] = dict
        """Counters of the table, cumulative."""
        self._metrics = WallMetrics(table, common=settings.metric_labels)
        sink = BubbleSink(
            settings.run_dir / DIR_METRICS / f"{settings.process}.jsonl",
            process=settings.process,
            role=_ROLE,
            instance=self.instance,
        )
        self.recorder = Recorder(sink=sink, metrics=self._metrics)
        self._server = SignalsServer(Signals(metrics=self._render, status=self._all_numbers, fault=self._why_not))

    def show(self, *, numbers: Callable[[], Mapping[str, Any]], fault: Callable[[], str]) -> None:
        """From now on there is something to show. `fault`: why this rank cannot compute; "" if it can."""
        self._numbers, self._fault = numbers, fault

    async def __aenter__(self) -> Self:
        self.samples = asyncio.create_task(self.recorder.run(), name="trainer-bubble-samples")
        return self

    async def serve(self, *, weights: str | None = None) -> None:
        """Open the endpoint and say where this process is; `weights`: where it serves them, None if it does not."""
        host = self._settings.variables.bind_host
        port = await self._server.start(host=host, port=self._settings.signals_port)
        write_endpoint(
            self._settings.run_dir, process=self._settings.process, weights=weights, signals=f"{host}:{port}"
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, RetryError) and self.samples.done():
                self.samples.result()  # its error is the cause
        finally:
            self.samples.cancel()
            await self._server.close()
            close_recorder(self.recorder)

    def _why_not(self) -> str:
        return self._fault()

    def _all_numbers(self) -> dict[str, Any]:
        wall_s, parts = self.recorder.totals()
        return {**self._numbers(), "wall_s": wall_s, "parts": parts}

    def _render(self) -> bytes:
        numbers = self._numbers()
        for name in self._gauges:
            self._metrics.set(name, numbers[name.removeprefix(_GAUGE)])
        for name, total in self.totals().items():
            self._metrics.total(name, total)
        self.recorder.refresh()
        return self._metrics.render()


def weight_totals(*, served_bytes: int, deltas: DeltaStore | None) -> dict[str, float]:
    """Return the counters of a rank that serves weights."""
    return {
        "weights_served_bytes": served_bytes,
        "weights_delta_made_bytes": 0 if deltas is None else deltas.made_bytes,
        "weights_delta_seconds": 0.0 if deltas is None else deltas.seconds,
    }


def close_recorder(recorder: Recorder) -> None:
    """Write the last sample, if it can be written."""
    try:
        recorder.close()
    except (UserError, OSError) as error:
        log.error("the last bubble sample could not be written: %s", error)  # noqa: TRY400 - the line says it all
