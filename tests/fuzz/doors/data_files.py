"""Files of lines and small documents that users name: data sets, pairs, lengths, rankers, profiles. They are read, or refused in one line."""

import json
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fuzz.harness import Door, Enter
from streamrl.errors import UserError, UserErrors
from streamrl.spec.tasks.datasets import JsonlDataset
from streamrl_cli import ranker
from streamrl_cli.profiling.record import read_profile
from streamrl_cli.simulation.reading import read_rows
from streamrl_workers.tasks import jsonl
from support.hostile import ACTS


def _data_set(path: Path) -> object:
    options = JsonlDataset(path=str(path), promptField="prompt", answerField="answer", heldOutPercent=50)
    source = jsonl.open_jsonl(options, seed=0, base_dir=path.parent)
    return [source.question("held_out", index).question.encode() for index in range(source.held_out_size)]


READERS: tuple[Callable[[Path], object], ...] = (
    _data_set,
    ranker.read_pairs,
    read_rows,
    read_profile,
)


@contextmanager
def opened() -> Iterator[Enter]:
    """All readers, on a file of the input."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"

        def enter(data: bytes) -> str:
            path.write_bytes(data)
            return " ".join(_read(reader, path) for reader in READERS)

        yield enter


def _read(reader: Callable[[Path], object], path: Path) -> str:
    try:
        reader(path)
    except (UserError, UserErrors) as error:
        assert not [line for line in error.lines if ACTS.search(line) or "\n" in line], "no plain lines"
        return re.sub(r"[^a-z ]+", "", error.lines[0].replace(str(path), ""))[:30]
    return "read"


def plant(patch: pytest.MonkeyPatch) -> None:
    """JSON as the standard library reads it: too deep is another error."""
    for module in (jsonl, ranker):
        patch.setattr(module, "parse_json", json.loads)


_PROFILE = {
    "version": 1,
    "job": "sum",
    "pools": [
        {
            "name": "p",
            "engine": "hf",
            "latency": [
                {"batch": 1, "milliseconds": 1.0, "lowestMilliseconds": 1.0, "highestMilliseconds": 2.0, "steps": 3}
            ],
            "fillMilliseconds": 1.0,
            "lengths": {"tokens": [3, 4]},
        }
    ],
}
DOOR = Door(
    name="data_files",
    opened=opened,
    honest=[
        b"".join(b'{"prompt": "p%d", "answer": %d, "tokens": %d, "x": [1]}\n' % (n, n, n) for n in range(8)),
        b"[812, 640, 3010]\n[1]\n",
        b'{"ranker": "scores", "scores": {"17": 0.5, "18": 1}}\n',
        b'{"ranker": "hashing", "bits": 4, "weights": {"1": 0.5}}\n',
        json.dumps(_PROFILE).encode(),
    ],
    words=[
        b'"prompt": ',
        b'"tokens": ',
        b'"answer": ',
        b'"ranker": "hashing"',
        b'{"prompt":"a","tokens":1}\n',
        b"\xef\xbb\xbf",
    ],
    most_held=96 << 20,
    most_cpu_s=10.0,
    plant=plant,
)
