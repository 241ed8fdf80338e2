"""`huggingFace`: a data set of the Hugging Face `datasets` library, of the hub or on disk, as a source of questions.

Owns the only door to the library, the translation of what it raises into one line, the checks of the rows and what a row
becomes. The library runs no code of a data set (versions from 4 on cannot). The hub's token is HF_TOKEN of the environment;
files go to the library's own cache directories. Invariants:
- All prompts and answers are checked when it is opened: a text that is not empty, a finite number or a class. A class becomes
  its name, a number the text that a local JSON file has, else its shortest form (72, not 72.0). In CSV files all cells are texts.
- No prompt of the held-out rows is trained: with `evaluation.split`, such rows leave the training split.
- Rows lie in memory-mapped Arrow files: processes that were forked from one another share them.
"""

import contextlib
import datetime
import decimal
import hashlib
import json
import math
import struct
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.errors import UserError, shorten
from streamrl.spec.task import SingleTask
from streamrl.spec.tasks.datasets import HuggingFaceDataset
from streamrl_workers.tasks.questions import Question, RowSource, content_of, hash_of, split_rows, text_of

if TYPE_CHECKING:
    from datasets import Dataset, DatasetBuilder, DatasetDict

FIELD = "spec.task.dataset.huggingFace"
HELD_OUT_FIELD = "spec.task.evaluation.split"
CHECK_ROWS = 1000
"""Rows read at once while a split is checked: few enough for any text, many enough to be quick."""
READERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv"}
"""Suffix of a single file -> reader of the library."""
SAVED_SPLITS = "dataset_dict.json"
"""What `DatasetDict.save_to_disk` leaves in a directory."""
SAVED_ONE = "state.json"
"""What `Dataset.save_to_disk` leaves in a directory."""
_JSON_SUFFIXES = (".json", ".jsonl")
"""Of files whose numbers are read as they are written: lines, or one array."""
_NARROW = {"float16": "<e", "float32": "<f"}
"""Types of columns of which Python shows digits that nobody wrote, with the format of `struct`."""
_NARROW_DIGITS = 10
"""Digits that tell any two of their numbers apart, and one."""
_MAX_LISTED = 20
"""More splits than this would fill the screen."""


def open_huggingface(task: SingleTask, *, seed: int, base_dir: Path) -> RowSource:
    """Load the splits and check every row.

    Raises:
        UserError: the data set, a split or a field is absent, or a row has no usable prompt or answer.
    """
    options, held_out_split = task.dataset.value, task.held_out_split
    assert isinstance(options, HuggingFaceDataset)
    names = [options.split] if held_out_split is None else [options.split, held_out_split]
    if len(set(names)) != len(names):
        raise UserError(field=HELD_OUT_FIELD, rule="must differ from the split that is trained", got=held_out_split)
    splits, content = load_splits(options, names=names, base_dir=base_dir)
    loading = None if options.path is None else loading_of(options, path=base_dir / options.path)
    train = _HubQuestions(splits[0], name=options.split, options=options, loading=loading)
    if held_out_split is None:
        held_out = train
        train_rows, held_out_rows = split_rows(
            train.hashes, percent=options.held_out_percent, field=f"{FIELD}.{_place(options)}"
        )
    else:
        held_out = _HubQuestions(splits[1], name=held_out_split, options=options, loading=loading)
        train_rows = _not_in(train, held_out, options=options)
        held_out_rows = array("Q", range(len(held_out.hashes)))
    return RowSource(
        train=train.question,
        train_rows=train_rows,
        held_out=held_out.question,
        held_out_rows=held_out_rows,
        seed=seed,
        place=lambda number: f"row {number} of the data set",
        content=content,
    )


def _place(options: HuggingFaceDataset) -> str:
    return "path" if options.name is None else "name"


def _not_in(train: "_HubQuestions", held_out: "_HubQuestions", *, options: HuggingFaceDataset) -> "array[int]":
    known = set(held_out.hashes)
    rows = array("Q", (row for row, digest in enumerate(train.hashes) if digest not in known))
    if not rows:
        raise UserError(
            field=f"{FIELD}.split",
            rule=f"every prompt of {options.split} is also one of {held_out.name}, which is held out",
            fix="name another split for evaluation, or none",
        )
    return rows


class _HubQuestions:
    """One split, checked."""

    def __init__(
        self,
        dataset: "Dataset",
        *,
        name: str,
        options: HuggingFaceDataset,
        loading: Mapping[str, Any] | None = None,
    ) -> None:
        """`loading`: arguments with which the library has read it from local files."""
        self.name = name
        self._options = options
        self._columns = _columns(dataset, name=name, options=options)
        self._readings = {
            column: _reading(dataset, column, split=name, loading=loading) for column in self._columns.values()
        }
        self._dataset = _without_media(dataset, keep=self._columns.values())
        self.hashes = array("Q", (hash_of(prompt) for prompt in self._checked_prompts()))
        """Of each row's prompt."""
        if not self.hashes:
            raise UserError(field=f"{FIELD}.split", rule=f"{name} must have at least one row")

    def question(self, row: int) -> Question:
        """One row. Columns that JSON cannot carry are left out of the metadata."""
        record, columns = self._dataset[int(row)], self._columns.values()
        prompt, *answers = self._texts([record[column] for column in columns], number=row)
        rest = {key: plain(value) for key, value in record.items() if key not in columns and _is_plain(value)}
        return Question(question=prompt, answer=answers[0] if answers else None, metadata=rest, source_index=int(row))

    def _checked_prompts(self) -> Iterator[str]:
        number = 0
        columns = list(self._columns.values())
        try:
            for batch in self._dataset.select_columns(columns).iter(batch_size=CHECK_ROWS):
                for values in zip(*(batch[column] for column in columns), strict=True):
                    prompt = self._texts(values, number=number)[0]
                    if not prompt.strip():
                        rule = f"row {number} of {self.name}: {self._options.prompt_field} must not be empty"
                        raise UserError(field=f"{FIELD}.promptField", rule=rule)
                    yield prompt
                    number += 1
        except UnicodeDecodeError as error:  # Arrow takes files at their word
            rule = f"a text of rows {number} to {number + CHECK_ROWS - 1} of {self.name} must be UTF-8: {error.reason}"
            raise UserError(field=f"{FIELD}.{_place(self._options)}", rule=rule) from error

    def _texts(self, values: Sequence[Any], *, number: int) -> list[str]:
        """The prompt, and the answer where the job names its column."""
        texts = []
        for (key, column), value in zip(self._columns.items(), values, strict=True):
            read = self._readings[column](value, number)
            text = text_of(read, field=f"{FIELD}.{key}", place=f"row {number} of {self.name}: {column}")
            texts.append(text)
        return texts


def _reading(
    dataset: "Dataset", column: str, *, split: str, loading: Mapping[str, Any] | None
) -> Callable[[Any, int], object]:
    """Return how a value of the column, and the number of its row, become what is shown."""
    from datasets import ClassLabel, Value

    feature = dataset.features[column]
    if isinstance(feature, ClassLabel):
        names = dict(enumerate(feature.names))
        return lambda value, _: names.get(value)
    if isinstance(feature, Value) and (code := _NARROW.get(feature.dtype)):
        return lambda value, _: value if value is None else _shortest(value, code=code)
    is_whole = isinstance(feature, Value) and not feature.dtype.startswith("float")
    written = None if loading is None or is_whole else _written(loading, split=split, column=column, rows=len(dataset))
    if written is None:
        return lambda value, _: value
    return lambda value, row: written[row].as_py() if isinstance(value, float) and math.isfinite(value) else value


def _written(loading: Mapping[str, Any], *, split: str, column: str, rows: int) -> Any | None:  # noqa: ANN401 - Arrow's array ships no types
    """Return the numbers and texts of a column by row, as its files have them; None if they cannot be read so.

    Args:
        loading: arguments with which the library has loaded the data set.
        split: name of the split.
        column: name of the column.
        rows: rows of the split.
    """
    import pyarrow as pa
    from datasets import load_dataset_builder

    files = (load_dataset_builder(**loading).config.data_files or {}).get(split, [])
    if not all(Path(file).suffix in _JSON_SUFFIXES for file in files):
        return None
    try:
        records = chain.from_iterable(map(_records, files))
        texts = pa.array([_text_or_none(record.get(column)) for record in records], type=pa.string())
    except (OSError, ValueError, RecursionError, AttributeError):  # as the library reads more than this
        return None
    return texts if len(texts) == rows else None


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _records(file: str) -> Iterator[Any]:
    read = partial(json.loads, parse_int=str, parse_float=str)
    with Path(file).open(encoding="utf-8-sig") as lines:
        is_array = lines.read(1) == "["
        lines.seek(0)
        yield from read(lines.read()) if is_array else (read(line) for line in lines if line.strip())


def _shortest(value: float, *, code: str) -> float:
    """Return the number with the fewest digits that its narrow type stores as this one."""
    for digits in range(1, _NARROW_DIGITS) if math.isfinite(value) and not value.is_integer() else ():
        short = float(f"{value:.{digits}g}")
        with contextlib.suppress(OverflowError):
            if struct.unpack(code, struct.pack(code, short))[0] == value:
                return short
    return value


def _columns(dataset: "Dataset", *, name: str, options: HuggingFaceDataset) -> dict[str, str]:
    """Names of the prompt's and the answer's column, which are there, by the job's field."""
    wanted = {"promptField": options.prompt_field}
    if options.answer_field is not None:
        wanted["answerField"] = options.answer_field
    for key, column in wanted.items():
        if column not in dataset.column_names:
            known = ", ".join(dataset.column_names)
            raise UserError(
                field=f"{FIELD}.{key}", rule=f"{name} has no column {column}", fix=f"its columns are {known}"
            )
    return wanted


def _without_media(dataset: "Dataset", *, keep: Collection[str]) -> "Dataset":
    """Without images, sounds and the like: to decode them takes packages and time, and no reward could have them."""
    from datasets.features.features import require_decoding

    media = [name for name, feature in dataset.features.items() if name not in keep and require_decoding(feature)]
    return dataset.remove_columns(media)


def _is_plain(value: object) -> bool:
    return not isinstance(value, bytes | bytearray)


def plain(value: Any) -> Any:  # noqa: ANN401 - any value of Arrow in, JSON out
    """The value as JSON can carry it: dates and decimals as texts, numbers that are none as null, bytes left out."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items() if _is_plain(item)}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value if _is_plain(item)]
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta | decimal.Decimal):
        return str(value)
    return value if isinstance(value, str | int | bool | None) else str(value)


def load_splits(options: HuggingFaceDataset, *, names: Sequence[str], base_dir: Path) -> "tuple[list[Dataset], str]":
    """The splits by their names, and what they are read from: a revision of the hub, or the content of files.

    Raises:
        UserError: the data set cannot be had, or has no such split.
    """
    import datasets

    datasets.disable_progress_bars()
    splits, builder = _load(options, base_dir=base_dir)
    if isinstance(splits, datasets.Dataset):
        splits = datasets.DatasetDict({str(splits.split or "train"): splits})
    fields = [f"{FIELD}.split", HELD_OUT_FIELD]
    for field, name in zip(fields, names, strict=False):
        if name not in splits:
            known = ", ".join([*map(str, splits)][:_MAX_LISTED])
            raise UserError(field=field, rule=f"the data set has no split {name}", fix=f"its splits are {known}")
    found = [splits[name] for name in names]
    if builder is None:
        files = [file["filename"] for split in found for file in split.cache_files]
    elif options.path is None:
        return found, f"revision {builder.hash}"
    else:
        files = [file for name in names for file in builder.config.data_files[name]]
    return found, content_of([_digest(Path(file)) for file in files])


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _load(options: HuggingFaceDataset, *, base_dir: Path) -> "tuple[Dataset | DatasetDict, DatasetBuilder | None]":
    """The data set, and what has built it from its files; None: it was saved as it is."""
    if options.path is not None:
        return _load_path(options, path=base_dir / options.path)

    try:
        return _built({"path": options.name, "name": options.config, "revision": options.revision}, options=options)
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


def _built(
    loading: Mapping[str, Any], *, options: HuggingFaceDataset
) -> "tuple[Dataset | DatasetDict, DatasetBuilder]":
    """Read the data set with these arguments of the library."""
    from datasets import load_dataset_builder
    from datasets.packaged_modules.csv.csv import CsvConfig

    builder = load_dataset_builder(**loading)
    if isinstance(builder.config, CsvConfig) and builder.config.features is None:
        shown = filter(None, (options.prompt_field, options.answer_field))
        builder = load_dataset_builder(**loading, converters=dict.fromkeys(shown, _cell))
    builder.download_and_prepare()
    return builder.as_dataset(), builder


def _cell(text: str) -> str | None:
    """Return the text of a cell of a CSV file as it is: `007` is no 7; None: it is empty."""
    return text or None


def _load_path(options: HuggingFaceDataset, *, path: Path) -> "tuple[Dataset | DatasetDict, DatasetBuilder | None]":
    import datasets

    if options.revision is not None:
        raise UserError(field=f"{FIELD}.revision", rule="goes with name, a path has none", got=options.revision)
    if not path.exists():
        raise UserError(field=f"{FIELD}.path", rule="must be a directory or a file", got=str(path))
    saved = _is_saved(path)
    if options.config is not None and (saved or path.is_file()):
        raise UserError(field=f"{FIELD}.config", rule="goes with name or a directory of files", got=options.config)
    if path.is_file() and path.suffix not in READERS:
        known = ", ".join(READERS)
        raise UserError(field=f"{FIELD}.path", rule=f"a file must end in one of {known}", got=str(path))
    try:
        loading = loading_of(options, path=path)
        if loading is None:
            return datasets.load_from_disk(str(path)), None
        return _built(loading, options=options)
    except Exception as error:  # a broken file surfaces as any exception of Arrow, pandas or the library
        raise UserError(
            field=f"{FIELD}.path", rule=f"cannot be loaded: {type(error).__name__}: {_one_line(error)}", got=str(path)
        ) from error


def _is_saved(path: Path) -> bool:
    return (path / SAVED_SPLITS).is_file() or (path / SAVED_ONE).is_file()


def loading_of(options: HuggingFaceDataset, *, path: Path) -> dict[str, Any] | None:
    """Return the arguments with which the library reads the files there; None if it has saved them itself."""
    if _is_saved(path):
        return None
    if path.is_file():
        return {"path": READERS[path.suffix], "data_files": str(path)}
    return {"path": str(path), "name": options.config}


def _one_line(error: BaseException) -> str:
    """The innermost cause says most: the library wraps errors of files as "an error occurred"."""
    while error.__cause__ is not None and type(error).__name__ == "DatasetGenerationError":
        error = error.__cause__
    return shorten(" ".join(str(error).split())).strip("'\"")
