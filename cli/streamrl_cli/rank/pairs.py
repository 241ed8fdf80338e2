"""Files of prompts and lengths: one JSON object a line. Owns reading, writing, and which prompts are held out."""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.errors import UserError
from streamrl_workers.scheduler.lengths import prompt_key

HELD_OUT_ONE_IN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A prompt and how long its completions are."""

    prompt: str
    tokens: float
    """Mean of its completions."""


def is_held_out(prompt: str) -> bool:
    """By the hash of the prompt: the same prompts are held out of every file, for every ranker."""
    return prompt_key(prompt) % HELD_OUT_ONE_IN == 0


def read_pairs(path: Path) -> list[Pair]:
    """Different prompts with their mean tokens, in the order of their first lines.

    Raises:
        UserError: the file cannot be read, or a line is no pair.
    """
    tokens: dict[str, list[float]] = {}
    for place, record in _records(path):
        count = record.get("tokens")
        if isinstance(count, bool) or not isinstance(count, int | float) or not (math.isfinite(count) and count >= 0):
            raise UserError(field=place, rule="tokens must be a number of at least 0", got=count)
        tokens.setdefault(_prompt(record, place), []).append(float(count))
    return [Pair(prompt=prompt, tokens=sum(counts) / len(counts)) for prompt, counts in tokens.items()]


def read_prompts(path: Path) -> list[str]:
    """Different prompts, in the order of their first lines.

    Raises:
        UserError: the file cannot be read, or a line has no prompt.
    """
    return list(dict.fromkeys(_prompt(record, place) for place, record in _records(path)))


def write_pairs(path: Path, pairs: Iterable[Pair]) -> None:
    """A file that `read_pairs` reads; it appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.part")
    with beside.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"prompt": pair.prompt, "tokens": pair.tokens}) + "\n" for pair in pairs)
    beside.replace(path)


def _prompt(record: dict[str, Any], place: str) -> str:
    prompt = record.get("prompt")
    if not isinstance(prompt, str) or not prompt:
        raise UserError(field=place, rule="prompt must be a text that is not empty", got=prompt)
    return prompt


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, object) of each line that is not blank; at least one."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise UserError(field=str(path), rule=f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(field=str(path), rule=f"must be UTF-8: {error.reason}") from None
    found = False
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place, found = f"{path} line {number}", True
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(field=place, rule=f"must be JSON: {error}") from None
        if not isinstance(record, dict):
            raise UserError(field=place, rule="must be an object", got=record)
        yield place, record
    if not found:
        raise UserError(field=str(path), rule="must hold at least one line")
