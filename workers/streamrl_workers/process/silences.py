"""Notices of processes without a heartbeat: a file beside the heartbeat file. This is the one way in which a silence is announced.

        watcher ── announce ──▶ <heartbeat file>.silence ── read_silences ──▶ terminal of `streamrl run`, warnings of the status

Owns the file's place and form. Does not own when a process counts as silent (`heartbeat.py`).

Invariants: who watches a heartbeat needs no connection to whom it concerns. All processes of a local run have one folder of heartbeats; on Kubernetes
the containers of a pod have one, and the user's code has another, which it may write to: what is read there is bounded.
"""

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from streamrl.errors import UserError
from streamrl.files import read_json, replace_file
from streamrl.keys import DIR_HEARTBEATS, ENV_HEARTBEAT_FILE, ENV_TASKS_SOCKET

PROCESS_FROZEN = "ProcessFrozen"
"""Type of the warning, and of the condition on Kubernetes."""
_SUFFIX = ".silence"
MOST_NOTICES = 64
"""Of a folder."""
_MOST_BYTES = 4096
MOST_CHARS = 500
"""Of a message; ours are shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """The newest notice of one process."""

    message: str
    holds: bool
    """False: the process beats again, or was killed."""


def announce(heartbeat: Path, silence: Silence) -> None:
    """Write the notice of the process with this heartbeat file; it replaces the one before."""
    with contextlib.suppress(UserError):  # a full disk
        replace_file(_notice(heartbeat), json.dumps(asdict(silence)).encode())


def forget(heartbeat: Path) -> None:
    """Remove the notice of an earlier process of this name."""
    with contextlib.suppress(OSError):
        _notice(heartbeat).unlink()


def folders_of(environ: Mapping[str, str]) -> list[Path]:
    """Return the folders in which a scheduler looks: that of its own heartbeat, and in a pod that of the container with the user's code."""
    own = environ.get(ENV_HEARTBEAT_FILE)
    return [*([Path(own).parent] if own else []), *hosted_folders(environ)]


def hosted_folders(environ: Mapping[str, str]) -> list[Path]:
    """Return the folder of the container with the user's code, which is beside its socket; none where there is no such container."""
    socket = environ.get(ENV_TASKS_SOCKET)
    return [Path(socket).with_name(DIR_HEARTBEATS)] if socket else []


def read_silences(folders: Iterable[Path]) -> dict[str, Silence]:
    """Return the newest notice of each process in these folders of heartbeats; a file that is no notice is left out."""
    found: dict[str, Silence] = {}
    for folder in folders:
        for path in sorted(islice(folder.glob(f"*{_SUFFIX}"), MOST_NOTICES)):
            with contextlib.suppress(UserError):
                document = read_json(path, most_bytes=_MOST_BYTES, beneath=folder)
                match document:
                    case {"message": str(message), "holds": bool(holds)}:
                        found[str(path)] = Silence(message=message[:MOST_CHARS], holds=holds)
    return found


def silence_warnings(silences: Iterable[Silence]) -> list[dict[str, str]]:
    """Return the notices that hold, as warnings of the status."""
    return [{"type": PROCESS_FROZEN, "message": one.message} for one in silences if one.holds]


def _notice(heartbeat: Path) -> Path:
    return heartbeat.with_name(heartbeat.name + _SUFFIX)
