"""Loads splits by name or path: the only door to the library `datasets`.

Owns the translation of what the library raises into one line. Does not look at rows.
The library runs no code of a data set (versions from 4 on cannot). The hub's token is HF_TOKEN of the environment; files
go to the library's own cache directories.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl.errors import UserError, shorten
from streamrl.spec.task import HuggingFaceDataset

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

FIELD = "spec.task.dataset.huggingFace"
READERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv"}
"""Suffix of a single file -> reader of the library."""
SAVED_SPLITS = "dataset_dict.json"
"""What `DatasetDict.save_to_disk` leaves in a directory."""
SAVED_ONE = "state.json"
"""What `Dataset.save_to_disk` leaves in a directory."""
_MAX_LISTED = 20
"""More splits than this would fill the screen."""


def load_splits(options: HuggingFaceDataset, *, names: Sequence[str], base_dir: Path) -> "list[Dataset]":
    """The splits by their names.

    Raises:
        UserError: the data set cannot be had, or has no such split.
    """
    import datasets

    datasets.disable_progress_bars()
    splits = _load(options, base_dir=base_dir)
    if isinstance(splits, datasets.Dataset):
        splits = datasets.DatasetDict({str(splits.split or "train"): splits})
    fields = [f"{FIELD}.split", "spec.task.evaluation.split"]
    for field, name in zip(fields, names, strict=False):
        if name not in splits:
            known = ", ".join([*map(str, splits)][:_MAX_LISTED])
            raise UserError(field=field, rule=f"the data set has no split {name}", fix=f"its splits are {known}")
    return [splits[name] for name in names]


def _load(options: HuggingFaceDataset, *, base_dir: Path) -> "Dataset | DatasetDict":
    if options.path is not None:
        return _load_path(options, path=base_dir / options.path)
    import datasets

    try:
        return datasets.load_dataset(options.name, options.config, revision=options.revision)
    except Exception as error:  # of the hub's client, of its HTTP client, of Arrow: the library translates few of them
        raise _refused(error, options=options) from error


def _refused(error: Exception, *, options: HuggingFaceDataset) -> UserError:
    wrong_config = isinstance(error, ValueError) and (
        "BuilderConfig" in str(error) or "onfig name is missing" in str(error)
    )
    key = "config" if wrong_config else "name"
    return UserError(
        field=f"{FIELD}.{key}",
        rule=f"cannot be loaded: {type(error).__name__}: {_one_line(error)}",
        got=options.config if wrong_config else options.name,
        fix="" if wrong_config else "check name, revision, network and HF_TOKEN, or use path",
    )


def _load_path(options: HuggingFaceDataset, *, path: Path) -> "Dataset | DatasetDict":
    import datasets

    if options.revision is not None:
        raise UserError(field=f"{FIELD}.revision", rule="goes with name, a path has none", got=options.revision)
    if not path.exists():
        raise UserError(field=f"{FIELD}.path", rule="must be a directory or a file", got=str(path))
    saved = (path / SAVED_SPLITS).is_file() or (path / SAVED_ONE).is_file()
    if options.config is not None and (saved or path.is_file()):
        raise UserError(field=f"{FIELD}.config", rule="goes with name or a directory of files", got=options.config)
    if path.is_file() and path.suffix not in READERS:
        known = ", ".join(READERS)
        raise UserError(field=f"{FIELD}.path", rule=f"a file must end in one of {known}", got=str(path))
    try:
        if saved:
            return datasets.load_from_disk(str(path))
        if path.is_file():
            return datasets.load_dataset(READERS[path.suffix], data_files=str(path))
        return datasets.load_dataset(str(path), options.config)
    except Exception as error:  # a broken file surfaces as any exception of Arrow, pandas or the library
        raise UserError(
            field=f"{FIELD}.path", rule=f"cannot be loaded: {type(error).__name__}: {_one_line(error)}", got=str(path)
        ) from error


def _one_line(error: BaseException) -> str:
    """The innermost cause says most: the library wraps errors of files as "an error occurred"."""
    while error.__cause__ is not None and type(error).__name__ == "DatasetGenerationError":
        error = error.__cause__
    return shorten(" ".join(str(error).split())).strip("'\"")
