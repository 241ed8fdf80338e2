"""Progress as a live picture in the terminal (rich)."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from streamrl_cli.runner.progress import (
    Progress,
    bubble_shares,
    failures_text,
    format_count,
    format_number,
    format_seconds,
    held_out_text,
)

SPARK = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 48
BAR_WIDTH = 40
PART_STYLES = {"busy": "green", "pipeline": "yellow", "weights": "blue", "skew": "magenta", "other": "bright_black"}


class LiveView:
    """A panel that is drawn again every second; what is said stays above it."""

    def __init__(self, progress: Progress, *, console: Console) -> None:
        self.progress = progress
        self.console = console
        self.warm_up: Mapping[str, Any] | None = None
        self.live = Live(console=console, refresh_per_second=4, transient=False)

    def __enter__(self) -> "LiveView":
        self.live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.live.__exit__(None, None, None)

    def say(self, text: str) -> None:
        """A line above the panel."""
        self.console.print(Text(text))

    def prepare(self, event: Mapping[str, Any]) -> None:
        """Progress of the warm-up."""
        if event.get("event") == "warmup":
            self.warm_up = event
            self.live.update(self._warm_up_panel())

    def update(self, steps: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> None:
        """Draw again."""
        for line in evaluations:
            self.say(held_out_text(line))
        self.live.update(self._panel())

    def _warm_up_panel(self) -> Panel:
        event = self.warm_up or {}
        bar = ProgressBar(total=event["steps"], completed=event["step"], width=BAR_WIDTH)
        text = Text(f"supervised warm-up  {event['step']}/{event['steps']}  loss {event['loss']:.3f}")
        return Panel(Group(text, bar), title=self.progress.folder.job.metadata.name, border_style="cyan")

    def _panel(self) -> Panel:
        progress = self.progress
        bar = ProgressBar(total=progress.total_steps, completed=progress.done_steps, width=BAR_WIDTH)
        head = Text(f"step {progress.done_steps}/{progress.total_steps}   eta {format_seconds(progress.eta_s())}")
        return Panel(
            Group(head, bar, Text(), self._numbers(), Text(), self._bubbles()),
            title=progress.folder.job.metadata.name,
            subtitle=str(progress.folder.path),
            border_style="cyan",
        )

    def _numbers(self) -> Table:
        progress, last = self.progress, (self.progress.recent() or [{}])[-1]
        held_out = [progress.evaluations[step]["mean_reward"] for step in sorted(progress.evaluations)]
        table = Table.grid(padding=(0, 2))
        table.add_row(
            "reward (train)", format_number(progress.mean_recent("reward_mean")), sparkline(progress.rewards.means())
        )
        table.add_row(
            "reward (held-out)",
            format_number(held_out[-1] if held_out else None),
            sparkline([value for value in held_out if value is not None]),
        )
        if failures := failures_text(progress.score_failures):
            table.add_row("", Text(failures, style="bold red"))
        table.add_row("tokens/s", format_count(progress.mean_recent("tokens_per_s")))
        table.add_row("samples/s", format_count(progress.mean_recent("samples_per_s")))
        table.add_row("queue", str(progress.numbers.get("queue", "–")))
        table.add_row("generators", replicas_text(progress))
        table.add_row(
            "staleness", f"{format_number(last.get('staleness_mean'), digits=2)} (max {last.get('staleness_max', '–')})"
        )
        return table

    def _bubbles(self) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_row("", Text("share of the wall", style="dim"), legend())
        for name, parts, wall_s in process_bubbles(self.progress.numbers):
            shares = bubble_shares(parts, wall_s=wall_s)
            table.add_row(name, share_bar(shares), Text(f"busy {shares['busy']:.0%}"))
        return table


def replicas_text(progress: Progress) -> str:
    """Connected generators by pool, with the bounds of pools that change: `math 2 (1 to 4), code 1`."""
    pools = {pool.name: pool.scaling for pool in progress.folder.job.spec.generators}
    bounds = {
        name: f" ({scaling.auto.min_replicas} to {scaling.auto.max_replicas})" if scaling.auto is not None else ""
        for name, scaling in pools.items()
    }
    return ", ".join(f"{name} {count}{bounds[name]}" for name, count in progress.replicas().items())


def process_bubbles(numbers: Mapping[str, Any]) -> list[tuple[str, Mapping[str, float], float]]:
    """(process, parts in seconds, wall in seconds) of the trainer and each generator."""
    rows = []
    trainer = numbers.get("trainer")
    if trainer:
        rows.append(("trainer", trainer["bubbles"], trainer["wall_s"]))
    rows.extend((one["id"], one["bubbles"], one["wall_s"]) for one in numbers.get("generators", ()))
    return rows


def legend() -> Text:
    """Names of the parts in their colours."""
    return Text("  ").join(Text(part, style=style) for part, style in PART_STYLES.items())


def share_bar(shares: Mapping[str, float], *, width: int = BAR_WIDTH) -> Text:
    """A bar of `width` characters, a colour a part."""
    text, drawn, total = Text(), 0, 0.0
    for part, style in PART_STYLES.items():
        total += shares[part]
        until = min(width, round(total * width))
        text.append("█" * (until - drawn), style=style)
        drawn = until
    text.append(" " * (width - drawn))
    return text


def sparkline(values: list[float], *, width: int = SPARK_WIDTH) -> Text:
    """The values as a row of blocks, averaged down to `width`."""
    if len(values) < 2:  # noqa: PLR2004 - one value has no shape
        return Text()
    count = min(width, len(values))
    cells = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    means = [sum(cell) / len(cell) for cell in cells]
    low, high = min(means), max(means)
    scale = (len(SPARK) - 1) / (high - low) if high > low else 0.0
    return Text("".join(SPARK[round((mean - low) * scale)] for mean in means), style="cyan")
