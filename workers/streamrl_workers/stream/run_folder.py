"""The small files of a run folder by which processes find each other; each is replaced whole or not at all.

    endpoints/<process>.json   where a process listens; written once its ports are bound, read by the runner
    model.json                 where the initial model lies, in the directory that the containers of a pod share
    store.json                 where the run's checkpoints are, and by that whose run the folder holds

Does not own making the model (`models/prepare.py`), nor checkpoints. On Kubernetes a journal's volume may be kept
(`storage.journal.whenDeleted: Retain`) and be found by a later job of the same name: `claim_run_folder` refuses it, since
its result is not that job's result.
"""

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path

from streamrl.errors import UserError
from streamrl.files import replace_file
from streamrl.keys import DIR_ENDPOINTS, ENV_MODEL_PATH, ENV_SHARED_DIR, ENV_STORE_DIR, FILE_MODEL, FILE_STORE

_LOOK_S = 0.2
"""Between two looks."""
_PATH_KEY = "path"


def write_json_atomically(path: Path, document: object) -> None:
    """Replace `path` by `document`; a reader sees the old file or the new one, also after a power cut.

    Raises:
        UserError: it cannot be written, on a full disk too.
    """
    replace_file(path, json.dumps(document).encode() + b"\n")


def write_endpoint(
    run_dir: Path, *, process: str, signals: str | None, grpc: str | None = None, weights: str | None = None
) -> None:
    """Publish this process's addresses, each as host:port; None: it serves none."""
    path = run_dir / DIR_ENDPOINTS / f"{process}.json"
    write_json_atomically(path, {"grpc": grpc, "weights": weights, "signals": signals, "pid": os.getpid()})


class ModelTimeoutError(TimeoutError):
    """Nobody has made the model ready in time; the text says what was awaited."""


def write_model_path(file: Path, *, directory: Path) -> None:
    """Say where the model is."""
    write_json_atomically(file, {_PATH_KEY: str(directory)})


def read_model_path(environ: Mapping[str, str]) -> str | None:
    """Directory (or hub name) of the initial model; None: nobody has said it (yet)."""
    if path := environ.get(ENV_MODEL_PATH):
        return path
    shared = environ.get(ENV_SHARED_DIR)
    if not shared:
        return None
    file = Path(shared) / FILE_MODEL
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))[_PATH_KEY])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(field=str(file), rule=f"cannot be read: {error}", fix="let prepare write it anew") from None


async def await_model_path(environ: Mapping[str, str], *, timeout_s: float) -> str | None:
    """The same, once it is there; None at once where there is no shared directory to wait for.

    Raises:
        ModelTimeoutError: it was not there in time.
    """
    loop = asyncio.get_running_loop()
    end_s = loop.time() + timeout_s
    while (place := read_model_path(environ)) is None and environ.get(ENV_SHARED_DIR):
        if loop.time() >= end_s:
            file = Path(environ[ENV_SHARED_DIR]) / FILE_MODEL
            raise ModelTimeoutError(f"waited {timeout_s:g} s in vain for {file}, which prepare writes")
        await asyncio.sleep(_LOOK_S)
    return place


def claim_run_folder(run_dir: Path, *, store: Path) -> None:
    """Make the place of the checkpoints, and say in the run folder where it is.

    Raises:
        UserError: the run folder holds another job's run, or one of the two cannot be written.
    """
    if store == run_dir:
        return
    try:
        held = _held_store(run_dir / FILE_STORE)
        if held in (None, str(store)):
            store.mkdir(parents=True, exist_ok=True)
        if held is None:
            write_json_atomically(run_dir / FILE_STORE, {_PATH_KEY: str(store)})
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


def _held_store(file: Path) -> object:
    """What it says; None: there is none, or it cannot be understood and is written anew."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return document.get(_PATH_KEY) if isinstance(document, dict) else None
