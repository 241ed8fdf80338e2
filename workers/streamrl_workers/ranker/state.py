"""The re-tuned model in the run's folder: `model-<rounds>/`, written whole, the newest one counts.

A folder is written beside its place and renamed, so a killed process leaves the last whole one. It belongs to the ranker that the job
names: one that began from another folder is passed over. Owns the folders' names and their order, not what is in them.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

_PREFIX = "model-"
_PART = "part"
_ORIGIN = "origin.json"


class ModelState:
    """Folders of one run."""

    def __init__(self, folder: Path, *, origin: str) -> None:
        """`origin`: the folder that tuning began from. Makes `folder`, removes what a killed process left half written."""
        self._folder = folder
        self._origin = origin
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder / _PART, ignore_errors=True)

    def newest(self) -> tuple[int, Path] | None:
        """(rounds, folder) of the newest model of this ranker."""
        found = [(rounds, path) for rounds, path in self._all() if self._is_ours(path)]
        return max(found, default=None)

    def save(self, rounds: int, write: Callable[[Path], None]) -> None:
        """Keep what `write` puts into a folder, and nothing older."""
        part = self._folder / _PART
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        write(part)
        (part / _ORIGIN).write_text(json.dumps({"origin": self._origin}) + "\n", encoding="utf-8")
        older = self._all()
        target = self._folder / f"{_PREFIX}{rounds}"
        shutil.rmtree(target, ignore_errors=True)
        part.rename(target)
        for number, path in older:
            if number != rounds:
                shutil.rmtree(path, ignore_errors=True)

    def _all(self) -> list[tuple[int, Path]]:
        return [
            (int(number), path)
            for path in self._folder.glob(f"{_PREFIX}*")
            if (number := path.name.removeprefix(_PREFIX)).isdigit()
        ]

    def _is_ours(self, path: Path) -> bool:
        try:
            return bool(json.loads((path / _ORIGIN).read_text(encoding="utf-8"))["origin"] == self._origin)
        except (OSError, ValueError, KeyError, TypeError):
            return False
