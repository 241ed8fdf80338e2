"""Progress as plain lines: for logs, pipes and CI."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, TextIO

from streamrl_cli.runner.progress import (
    Progress,
    failures_text,
    format_count,
    format_number,
    format_seconds,
    held_out_text,
)

LINE_EVERY_STEPS = 10
"""A line for each step would fill a log; evaluations are always shown."""


class PlainView:
    """Writes a line now and then."""

    def __init__(self, progress: Progress, *, out: TextIO) -> None:
        self.progress = progress
        self.out = out
        self.warm_up_tenths = 0
        self.failures: Counter[str] = Counter()
        """Scores that failed since the last line that told of them."""
        self.has_told_failures = False

    def __enter__(self) -> "PlainView":
        return self

    def __exit__(self, *_: object) -> None:
        self.out.flush()

    def say(self, text: str) -> None:
        """A line of its own."""
        print(text, file=self.out, flush=True)

    def prepare(self, event: Mapping[str, Any]) -> None:
        """Progress of the warm-up."""
        if event.get("event") != "warmup":
            return
        tenth = 10 * event["step"] // event["steps"]
        if tenth > self.warm_up_tenths:
            self.warm_up_tenths = tenth
            self.say(f"warm-up {event['step']}/{event['steps']}  loss {event['loss']:.3f}")

    def update(self, steps: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> None:
        """Show what is new."""
        for line in evaluations:
            self.say(held_out_text(line))
        for line in steps:
            self.failures.update(line.get("score_failures", {}))
            if (line["step"] + 1) % LINE_EVERY_STEPS == 0 or line["step"] + 1 == self.progress.total_steps:
                self.say(self._step_text(line) + self._new_failures(before="  "))
        if not self.has_told_failures and (text := self._new_failures()):
            self.say(text)  # the first ones at once: a mistake in a reward is found early

    def _new_failures(self, *, before: str = "") -> str:
        text = failures_text(self.failures)
        self.has_told_failures |= bool(text)
        self.failures.clear()
        return before + text if text else ""

    def _step_text(self, line: Mapping[str, Any]) -> str:
        return (
            f"step {line['step'] + 1}/{self.progress.total_steps}"
            f"  reward {format_number(line['reward_mean'])}"
            f"  {format_count(line['tokens_per_s'])} tok/s"
            f"  length {format_number(line['length_mean'], digits=1)}"
            f"  staleness {format_number(line['staleness_mean'], digits=2)}"
            f"  queue {line['queue']}"
            f"  eta {format_seconds(self.progress.eta_s())}"
        )
