"""The trained model in the run folder, whole or not at all."""

import shutil
from pathlib import Path

from streamrl.errors import UserError
from streamrl_workers.trainer.checkpoint import sync_tree
from streamrl_workers.trainer.engine import TrainEngine


def export_once(engine: TrainEngine, *, directory: Path) -> Path:
    """Export into `directory`, unless that was done before; returns it.

    Raises:
        UserError: the disk does not take it.
    """
    if directory.exists():
        return directory
    partial = directory.with_name(f".partial-{directory.name}")
    try:
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        engine.export(partial)
        sync_tree(partial)
        return partial.rename(directory)
    except OSError as error:
        raise UserError(
            field=str(directory),
            rule=f"the model cannot be written: {error.strerror or error}",
            fix="free the disk, then resume the run",
        ) from error
