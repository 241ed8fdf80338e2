"""Progress for people: a live picture in the terminal (rich), or plain lines for logs, pipes and CI."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from streamrl.text import plain
from streamrl_cli.runner.progress import (
    RunProgress,
    bubble_shares,
    failures_text,
    format_count,
    format_number,
    format_seconds,
    held_out_losses,
    held_out_text,
    main_wait,
    processes,
    warning_texts,
)

SPARK = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 48
BAR_WIDTH = 40
PART_STYLES = {"busy": "green", "pipeline": "yellow", "weights": "blue", "skew": "magenta", "other": "bright_black"}
SHOWN_WAIT = 0.05
"""Share of the wall from which on a cause of idleness is named."""
LINE_EVERY_STEPS = 10
"""A line for each step would fill a log; evaluations are always shown."""


class LiveView:
    """A panel that is drawn again every second; what is said stays above it."""

    def __init__(self, progress: RunProgress, *, console: Console) -> None:
        self.progress = progress
        self.console = console
        self.live = Live(console=console, refresh_per_second=4, transient=False)

    def __enter__(self) -> "LiveView":
        self.live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.live.__exit__(None, None, None)

    def say(self, text: str) -> None:
        """A line above the panel."""
        self.console.print(_text(text))

    def prepare(self, event: Mapping[str, Any]) -> None:
        """Progress of the warm-up."""
        if event.get("event") == "warmup":
            self.live.update(self._warm_up_panel(event))

    def update(self, steps: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> None:
        """Draw again."""
        for line in evaluations:
            self.say(held_out_text(line))
        self.live.update(run_panel(self.progress))

    def _warm_up_panel(self, event: Mapping[str, Any]) -> Panel:
        bar = ProgressBar(total=event["steps"], completed=event["step"], width=BAR_WIDTH)
        text = Text(f"supervised warm-up  {event['step']}/{event['steps']}  loss {event['loss']:.3f}")
        return Panel(Group(text, bar), title=_text(self.progress.folder.job.metadata.name), border_style="cyan")


def run_panel(progress: RunProgress, *, places: Mapping[str, str] | None = None) -> Panel:
    """The run at a glance: how far it is, figures, pools, where the wall goes, and what a person should look at.

    `places`: pool -> the cluster that it is in, where there are several.
    """
    bar = ProgressBar(total=progress.total_steps, completed=progress.done_steps, width=BAR_WIDTH)
    left = "" if progress.done_steps >= progress.total_steps else f"   eta {format_seconds(progress.eta_s())}"
    head = Text(f"step {progress.done_steps}/{progress.total_steps}{left}")
    parts: list[RenderableType] = [head, bar, Text(), figures_table(progress)]
    if processes(progress.status):
        parts += [Text(), bubbles_table(progress)]
    if pools := progress.status.get("scaling", {}).get("pools"):
        parts += [Text(), pools_table(pools, generators=progress.status.get("generators", ()), places=places or {})]
    messages = warning_texts(progress.status, silent=progress.silences)
    parts += [_text(f"warning: {message}", style="bold red") for message in messages]
    return Panel(
        Group(*parts),
        title=_text(progress.folder.job.metadata.name),
        subtitle=_text(progress.folder.path),
        border_style="cyan",
    )


def figures_table(progress: RunProgress) -> Table:
    """Figures of the last steps and evaluations."""
    last = (progress.recent() or [{}])[-1]
    held_out = [progress.evaluations[step]["mean_reward"] for step in sorted(progress.evaluations)]
    table = Table.grid(padding=(0, 2))
    spec = progress.folder.job.spec
    if spec.algorithm.supervised is not None:
        table.add_row("loss (train)", format_number(progress.loss()), sparkline(progress.losses))
        last_loss = progress.held_out_losses[-1] if progress.held_out_losses else None
        table.add_row("loss (held-out)", format_number(last_loss), sparkline(progress.held_out_losses))
    else:
        table.add_row("reward (train)", format_number(progress.mean_recent("reward_mean")), sparkline(progress.rewards))
    if spec.generators:
        table.add_row(
            "reward (held-out)",
            format_number(held_out[-1] if held_out else None),
            sparkline([value for value in held_out if value is not None]),
        )
    if failures := failures_text(progress.score_failures):
        table.add_row("", _text(failures, style="bold red"))
    table.add_row("tokens/s", format_count(progress.mean_recent("tokens_per_s")))
    table.add_row("samples/s", format_count(progress.mean_recent("samples_per_s")))
    if progress.status:
        table.add_row("queue", _text(progress.status.get("queue", "–")))
        if spec.generators:
            table.add_row("generators", _text(replicas_text(progress)))
    if spec.algorithm.supervised is None:
        most = f"max {last.get('staleness_max', '–')} of {spec.pipeline.staleness}"
        table.add_row("staleness", _text(f"{format_number(last.get('staleness_mean'), digits=2)} ({most})"))
    if cost := progress.status.get("cost"):
        table.add_row("cost", format_number(cost))
    return table


def bubbles_table(progress: RunProgress) -> Table:
    """A bar for each process."""
    table = Table.grid(padding=(0, 2))
    table.add_row("", Text("share of the wall", style="dim"), legend())
    for one in processes(progress.status):
        shares = bubble_shares(one["bubbles"], wall_s=one["wall_s"])
        cause, share = main_wait(one["bubbles"], wall_s=one["wall_s"])
        wait = f", waits: {cause} {share:.0%}" if share >= SHOWN_WAIT else ""
        table.add_row(_text(one["id"]), share_bar(shares), _text(f"busy {shares['busy']:.0%}{wait}"))
    return table


def pools_table(
    pools: Mapping[str, Any], *, generators: Sequence[Mapping[str, Any]], places: Mapping[str, str]
) -> Table:
    """Size, speed and memory of each pool, and its cluster where there are several."""
    table = Table.grid(padding=(0, 2))
    head = ("pool", "generators", "active", "tokens/s", "KV", *(["cluster"] if places else []))
    table.add_row(*(Text(name, style="dim") for name in head))
    for name, pool in pools.items():
        ours = [one for one in generators if one["pool"] == name and one.get("kv_capacity_tokens")]
        used = sum(one.get("kv_used_tokens") or 0 for one in ours)
        kv = f"{used / sum(one['kv_capacity_tokens'] for one in ours):.0%}" if ours else "–"
        speed = format_count(pool["tokens_per_s"])
        place = [_text(places.get(name, "–"))] if places else []
        size = _text(f"{pool['active']}/{pool['slots']}")
        table.add_row(_text(name), _text(pool["generators"]), size, speed, kv, *place)
    return table


def _text(value: object, *, style: str = "") -> Text:
    """What others may have written: neither rich's markup nor the terminal's control characters count in it."""
    return Text(plain(str(value)), style=style)


def replicas_text(progress: RunProgress) -> str:
    """Connected generators by pool, with the bounds of pools that change: `math 2 (1 to 4), code 1`."""
    pools = {pool.name: pool.scaling for pool in progress.folder.job.spec.generators}
    bounds = {
        name: f" ({scaling.auto.min_replicas} to {scaling.auto.max_replicas})" if scaling.auto is not None else ""
        for name, scaling in pools.items()
    }
    return ", ".join(f"{name} {count}{bounds[name]}" for name, count in progress.replicas().items())


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


def sparkline(values: Sequence[float], *, width: int = SPARK_WIDTH) -> Text:
    """The values as a row of blocks, averaged down to `width`."""
    if len(values) < 2:  # noqa: PLR2004 - one value has no shape
        return Text()
    count = min(width, len(values))
    cells = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    means = [sum(cell) / len(cell) for cell in cells]
    low, high = min(means), max(means)
    scale = (len(SPARK) - 1) / (high - low) if high > low else 0.0
    return Text("".join(SPARK[round((mean - low) * scale)] for mean in means), style="cyan")


class PlainView:
    """Writes a line now and then."""

    def __init__(self, progress: RunProgress, *, say: Callable[[str], None]) -> None:
        """`say` writes a line."""
        self.progress = progress
        self.say = say
        self.warm_up_tenths = 0
        self.failures: Counter[str] = Counter()
        """Scores that failed since the last line that told of them."""

    def __enter__(self) -> "PlainView":
        return self

    def __exit__(self, *_: object) -> None:
        pass

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

    def _new_failures(self, *, before: str = "") -> str:
        text = failures_text(self.failures)
        self.failures.clear()
        return before + text if text else ""

    def _learned(self, line: Mapping[str, Any]) -> str:
        if self.progress.folder.job.spec.algorithm.supervised is None:
            return f"  reward {format_number(line['reward_mean'])}"
        losses = held_out_losses([line])
        held_out = f" (held-out {format_number(losses[-1])})" if losses else ""
        return f"  loss {format_number(line['trainer']['loss'])}{held_out}"

    def _step_text(self, line: Mapping[str, Any]) -> str:
        return (
            f"step {line['step'] + 1}/{self.progress.total_steps}"
            f"{self._learned(line)}"
            f"  {format_count(line['tokens_per_s'])} tok/s"
            f"  length {format_number(line['length_mean'], digits=1)}"
            f"  staleness {format_number(line['staleness_mean'], digits=2)}"
            f"  queue {line['queue']}"
            f"  eta {format_seconds(self.progress.eta_s())}"
        )
