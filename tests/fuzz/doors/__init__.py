"""The doors that are tried, by name. A new one: a file with a `DOOR`, and a line here."""

from fuzz.doors import (
    checkpoint_meta,
    data_files,
    job_file,
    journal,
    protocol,
    run_folder,
    signals_port,
    status_page,
    task_frames,
)
from fuzz.harness import Door

_MODULES = (
    checkpoint_meta,
    data_files,
    job_file,
    journal,
    protocol,
    run_folder,
    signals_port,
    status_page,
    task_frames,
)
DOORS: dict[str, Door] = {module.DOOR.name: module.DOOR for module in _MODULES}
