"""Where the initial model lies: STREAMRL_MODEL_PATH, or `model.json` in the directory that the containers of a pod share.

Owns reading and writing `model.json`. Does not own making the model (`models/prepare.py`), which may take hours.
"""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

from streamrl.errors import UserError
from streamrl.keys import ENV_MODEL_PATH, ENV_SHARED_DIR, FILE_MODEL
from streamrl_workers.stream.files import write_json_atomically

_LOOK_S = 0.2
"""Between two looks."""
_KEY = "path"


class ModelTimeoutError(TimeoutError):
    """Nobody has made the model ready in time; the text says what was awaited."""


def write_model_place(file: Path, *, directory: Path) -> None:
    """Say where the model is."""
    write_json_atomically(file, {_KEY: str(directory)})


def model_place(environ: Mapping[str, str]) -> str | None:
    """Directory (or hub name) of the initial model; None: nobody has said it (yet)."""
    if path := environ.get(ENV_MODEL_PATH):
        return path
    shared = environ.get(ENV_SHARED_DIR)
    if not shared:
        return None
    file = Path(shared) / FILE_MODEL
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))[_KEY])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(field=str(file), rule=f"cannot be read: {error}", fix="let prepare write it anew") from None


async def await_model_place(environ: Mapping[str, str], *, timeout_s: float) -> str | None:
    """The same, once it is there; None at once where there is no shared directory to wait for.

    Raises:
        ModelTimeoutError: it was not there in time.
    """
    loop = asyncio.get_running_loop()
    end_s = loop.time() + timeout_s
    while (place := model_place(environ)) is None and environ.get(ENV_SHARED_DIR):
        if loop.time() >= end_s:
            file = Path(environ[ENV_SHARED_DIR]) / FILE_MODEL
            raise ModelTimeoutError(f"waited {timeout_s:g} s in vain for {file}, which prepare writes")
        await asyncio.sleep(_LOOK_S)
    return place
