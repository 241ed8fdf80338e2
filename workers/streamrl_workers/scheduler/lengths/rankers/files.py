"""Ranker files: JSON objects with the ranker's registry key under `ranker` and its state beside it.

Owns reading and writing them and the lines about what is wrong with one. Used by the scheduler's shell and the command line, never
by the core. Rankers that cannot live in the scheduler's process have folders (`streamrl_workers/ranker/folders.py`), only looked at here.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streamrl.errors import UserError
from streamrl.spec.scheduling import Ranker as RankerChoice
from streamrl_workers.ranker import folders
from streamrl_workers.scheduler.lengths.rankers import RANKERS, Ranker, make_ranker
from streamrl_workers.stream.files import write_json_atomically

FIELD = "spec.scheduling.ranker"
_WITH_FILE = [key for key in RANKERS if key not in folders.RANKERS]
MAX_FILE_BYTES = 64 * 2**20
"""Far above what `hashing` writes; a table of a million prompts."""


def open_ranker(choice: RankerChoice | None, *, base_dir: Path) -> Ranker | None:
    """The ranker that a job names, with the state of its file; relative paths begin at `base_dir`.

    Raises:
        UserError: the file or folder cannot be read, or is not one of this ranker.
    """
    if choice is None:
        return None
    path: str | None = choice.value.path
    if path is None:
        return make_ranker(choice.key)
    field = f"{FIELD}.{choice.key}.path"
    if choice.key in folders.RANKERS:
        folders.check_folder(base_dir / path, ranker=choice.key, field=field)
        return make_ranker(choice.key)
    key, ranker = read_ranker(base_dir / path, field=field)
    if key != choice.key:
        raise UserError(field=field, rule=f"must be a file of the ranker {choice.key}", got=f"{path} ({key})")
    return ranker


def read_ranker(path: Path, *, field: str) -> tuple[str, Ranker]:
    """(registry key, ranker) of a file.

    Raises:
        UserError: it cannot be read, or no ranker wrote it. `field` names it.
    """
    document = _read_json(path, field=field)
    key = document.get("ranker")
    if key not in _WITH_FILE:
        rule = f"must name its ranker, one of {', '.join(_WITH_FILE)}"
        raise UserError(field=field, rule=rule, got=key or str(path))
    try:
        return key, make_ranker(key, document)
    except ValueError as error:
        raise UserError(field=field, rule=str(error), got=str(path), fix="fit or score again") from None


def write_ranker(path: Path, *, key: str, state: Mapping[str, Any]) -> None:
    """Write a file that `read_ranker` reads."""
    write_json_atomically(path, {"ranker": key, **state})


def _read_json(path: Path, *, field: str) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UserError(field=field, rule=f"must be at most {MAX_FILE_BYTES >> 20} MiB", got=str(path))
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(field=field, rule=f"cannot be read: {error.strerror}", got=str(path)) from None
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise UserError(field=field, rule="must be a JSON object that `streamrl rank` wrote", got=str(path))
    return document
