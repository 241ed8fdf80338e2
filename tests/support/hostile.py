"""A run folder that somebody else made: every file that `report` reads, with one text wherever a text may stand."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from support.jobs import simulated_job

MARKUP = "</script></title><script>document.title='run'</script><img src=x onerror=\"document.title='run'\"><!--<b>'\"{{7*7}}%{y}"
"""Breaks out of whatever it is put into, if anything lets it."""
CONTROLS = "a\x1b[31m\x07\x08\x7f\x9b2J\u202e\x1b]52;c;eA==\x1b\\\rb"
"""Colours, rings, moves, turns the direction, writes the clipboard."""
ACTS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""What nothing of ours may write to a terminal."""


def foreign_folder(path: Path, *, text: str) -> Path:
    """A run folder with `text` in every field that may hold a text."""
    job = simulated_job()
    job["metadata"]["annotations"] = {"note": text}
    job["spec"]["task"]["rewards"] = [
        {"name": name, "weightPercent": 50, "exactMatch": {}} for name in ("answer", "style")
    ]
    (path / "metrics").mkdir(parents=True)
    write_json(path / "job.json", job)
    write_json(path / "run.json", {"base_dir": text, "created_s": 1.0})
    write_json(path / "result.json", {"status": text, "reason": text})
    write_lines(path / "metrics" / "steps.jsonl", *map(step_line, (0, 1), (text, text)))
    write_lines(path / "metrics" / "evaluations.jsonl", {"step": 0, "mean_reward": 0.5, "prompts": 8, text: text})
    write_lines(
        path / "metrics" / "scaling.jsonl",
        *({"time_s": 1.0 + at, "pool": text, "from": at, "to": at + 1, "reason": text} for at in range(2)),
    )
    name = text.replace("/", "\u2044")[:80]
    write_lines(path / "metrics" / f"{name}.jsonl", wall_line(text))
    return path


def step_line(number: int, text: str) -> dict[str, Any]:
    """A line of `steps.jsonl`."""
    numbers = {"reward_mean": 0.5, "length_mean": 9.0, "length_max": 20, "tokens_per_s": 100.0, "queue": 3}
    ages = {"staleness_mean": 0.5, "staleness_max": 1, "time_s": 1.0 + number, "elapsed_s": 2.0, "tokens": 200}
    texts = {"score_failures": {text: 2}, "dropped": {text: 3}, "reward_parts": {text: 0.5}, "trainer": {text: 0.5}}
    return {"step": number, **numbers, **ages, **texts, text: text}


def wall_line(text: str) -> dict[str, Any]:
    """A line of a process's bubbles."""
    return {"t": 9.0, "process": text, "role": text, "instance": text, "wall_s": 2.0, "parts": {"busy": 2.0}}


def write_json(path: Path, document: object) -> None:
    """A JSON file."""
    path.write_text(json.dumps(document))


def write_lines(path: Path, *lines: object) -> None:
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


class Skeleton(HTMLParser):
    """What a browser makes of a page, without its texts: elements with attributes, comments, and the scripts' sources."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.parts: list[object] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self._script: dict[str, str | None] | None = None
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element."""
        self.parts.append((tag, attrs))
        self._script = dict(attrs) if tag == "script" else None

    def handle_endtag(self, tag: str) -> None:
        """The end of one."""
        self._script = None

    def handle_comment(self, data: str) -> None:
        """A comment."""
        self.parts.append(("comment", data))

    def handle_data(self, data: str) -> None:
        """A text; those of scripts are kept."""
        if self._script is not None:
            self.scripts.append((self._script, data))
