"""What a trainer shows on its signals port.

Owns: names of its gauges and numbers. Does not own: the server, the numbers.
"""

from typing import Any

from streamrl_workers.metrics.prometheus import Metrics
from streamrl_workers.metrics.recorder import Recorder
from streamrl_workers.metrics.signals import Pages
from streamrl_workers.trainer.loop import StepLoop
from streamrl_workers.trainer.session import Session

_SILENCE_S = 60.0
"""Without a scheduler for so long, a trainer is not healthy; its pod's sidecar is back within seconds."""


class TrainerPages:
    """Reads the step loop, the session and the recorder when a page is asked for."""

    def __init__(self, recorder: Recorder, *, metrics: Metrics) -> None:
        self._recorder = recorder
        self._metrics = metrics
        self._loop: StepLoop | None = None
        self._session: Session | None = None
        self._step = metrics.gauge("trainer_step", help_text="Steps that the weights have taken.")
        self._attempt = metrics.gauge(
            "trainer_attempt", help_text="Number of this trainer's attempt; before the first welcome: 0."
        )
        self._waiting = metrics.gauge(
            "trainer_waiting_groups", help_text="Groups received, not yet taken by the step loop."
        )

    def attach(self, loop: StepLoop, *, session: Session) -> None:
        """From now on there is something to show."""
        self._loop, self._session = loop, session

    def pages(self) -> Pages:
        """The callbacks of the signals server."""
        return Pages(metrics=self._render, numbers=self._numbers, fault=self._fault)

    def _render(self) -> bytes:
        numbers = self._numbers()
        self._step.set(numbers["step"])
        self._attempt.set(numbers["attempt"])
        self._waiting.set(numbers["waiting_groups"])
        self._recorder.refresh()
        return self._metrics.render()

    def _numbers(self) -> dict[str, Any]:
        wall_s, parts = self._recorder.totals()
        return {
            "step": self._loop.version if self._loop else 0,
            "attempt": self._loop.attempt if self._loop else 0,
            "waiting_groups": self._session.waiting_groups if self._session else 0,
            "wall_s": wall_s,
            "parts": parts,
        }

    def _fault(self) -> str:
        """A scheduler that comes back costs nothing; for one that does not, the link ends the process."""
        if self._session is None:
            return "the model is being loaded"
        if self._session.silent_s < _SILENCE_S:
            return ""
        return f"no scheduler for {self._session.silent_s:.0f} s"
