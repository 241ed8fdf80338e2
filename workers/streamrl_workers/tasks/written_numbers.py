"""Numbers of a data set as its local JSON files have them: the library turns 72 beside 0.5 into 72.0.

Owns which files a split was read from, and their numbers as texts. Knows JSON lines and arrays, uncompressed; of anything else
it says nothing, and numbers are shown in their shortest form.
"""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

SUFFIXES = (".json", ".jsonl")


def written_numbers(loading: Mapping[str, Any], *, split: str, column: str, rows: int) -> Any | None:  # noqa: ANN401 - Arrow's array ships no types
    """Return the numbers and texts of a column by row, as its files have them; None if they cannot be read so.

    Args:
        loading: arguments with which the library has loaded the data set.
        split: name of the split.
        column: name of the column.
        rows: rows of the split.
    """
    import pyarrow as pa  # type: ignore[import-untyped]
    from datasets import load_dataset_builder

    files = (load_dataset_builder(**loading).config.data_files or {}).get(split, [])
    if not all(Path(file).suffix in SUFFIXES for file in files):
        return None
    try:
        records = chain.from_iterable(map(_records, files))
        texts = pa.array([_text(record.get(column)) for record in records], type=pa.string())
    except (OSError, ValueError, RecursionError, AttributeError):  # as the library reads more than this
        return None
    return texts if len(texts) == rows else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _records(file: str) -> Iterator[Any]:
    read = partial(json.loads, parse_int=str, parse_float=str)
    with Path(file).open(encoding="utf-8-sig") as lines:
        is_array = lines.read(1) == "["
        lines.seek(0)
        yield from read(lines.read()) if is_array else (read(line) for line in lines if line.strip())
