"""Whose run a run folder holds: `store.json` says where its checkpoints are, and that place is one job's own.

Owns writing `store.json`, and the refusal of a run folder that holds another job's run. On Kubernetes a journal's volume may be kept
(`storage.journal.whenDeleted: Retain`) and be found by a later job of the same name: its result is not that job's result, and its
steps are in no checkpoint of that job.
"""

import json
from pathlib import Path

from streamrl.errors import UserError
from streamrl.keys import ENV_STORE_DIR, FILE_STORE
from streamrl_workers.stream.files import write_json_atomically

_KEY = "path"


def claim_run_folder(run_dir: Path, *, store: Path) -> None:
    """Make the place of the checkpoints, and say in the run folder where it is.

    Raises:
        UserError: the run folder holds another job's run, or one of the two cannot be written.
    """
    if store == run_dir:
        return
    try:
        held = _read(run_dir / FILE_STORE)
        if held in (None, str(store)):
            store.mkdir(parents=True, exist_ok=True)
        if held is None:
            write_json_atomically(run_dir / FILE_STORE, {_KEY: str(store)})
    except OSError as error:
        raise UserError(
            field=ENV_STORE_DIR,
            rule=f"cannot be written: {error.strerror or error}",
            got=str(store),
            fix="give a volume that the workers may write to",
        ) from error
    if held not in (None, str(store)):
        raise UserError(
            field="storage.journal",
            rule=f"the volume must be new or hold this job's run, of {store.name}",
            got=f"the run of {Path(str(held)).name}",
            fix="copy what you need and delete the journal's claim, or give the job another name",
        )


def _read(file: Path) -> object:
    """What it says; None: there is none, or it cannot be understood and is written anew."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return document.get(_KEY) if isinstance(document, dict) else None
