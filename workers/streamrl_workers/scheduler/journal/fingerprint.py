"""The fingerprint of the job's data, and of the code of its plug-ins, in the journal: by the field that says where they come from.

A group has only the index of its prompt. So a run that goes on with other data would train other prompts under the same
indices. Does not own how a fingerprint is made (`tasks/dataset.py`, `plugins/sources.py`), nor what happens to a run whose data has changed.
"""

import json
import sqlite3
from collections.abc import Mapping

from streamrl.errors import UserError
from streamrl.files import parse_json
from streamrl_workers.scheduler.journal.integrity import DamagedJournalError

Fingerprint = Mapping[str, str]
"""As `OpenedData.fingerprint`."""

_KEY = "data"
"""In the table `meta`. A journal of an earlier release has none."""
_ALLOW = "--allow-changed-data beside --resume, in a cluster spec.task.allowChangedData while the job is suspended"


def read_fingerprint(connection: sqlite3.Connection) -> Fingerprint | None:
    """Return the fingerprint of the data that the journal's groups are of; None: it holds none."""
    row = connection.execute("SELECT value FROM meta WHERE key = ?", (_KEY,)).fetchone()
    if row is None:
        return None
    found = parse_json(row[0])
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise DamagedJournalError("its fingerprint of the data is not one")
    return found


def write_fingerprint(connection: sqlite3.Connection, fingerprint: Fingerprint) -> None:
    """Replace the fingerprint."""
    connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (_KEY, json.dumps(dict(fingerprint))))


def changed_data(recorded: Fingerprint, found: Fingerprint) -> UserError:
    """Return the error that names the first change, of data or of a plug-in's code, and how many more there are."""
    changed = [field for field in {**recorded, **found} if recorded.get(field) != found.get(field)]
    first, more = changed[0], f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
    then, now = (data.get(first, "not there") for data in (recorded, found))
    what = "code" if first.endswith(".class") else "data"
    rule = f"the {what} has changed since the journal was written; recorded: {then}; now: {now}{more}"
    return UserError(field=first, rule=rule, fix=f"put the {what} back, or allow other {what}: {_ALLOW}")
