"""A run folder in `streamrl report`: a page without an element of the data and without a file from elsewhere, or one line.

The input is the folder: a line `=== NAME` begins a file, and the lines behind it are its content. `==> NAME` is a link to what they name,
`==| NAME` a pipe, `==/ NAME` a folder, `==+ NAME` a file of a terabyte that begins with them.
"""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fuzz.harness import Door, Enter
from streamrl.errors import UserError, UserErrors
from streamrl_cli.reporting import page
from streamrl_cli.reporting.data import read_run
from support.hostile import ACTS, Skeleton, foreign_folder

_FILE = re.compile(rb"^==([=>|/+]) ([^\n]{1,60})\n", re.MULTILINE)
_MOST_FILES = 50
_ELEMENTS = frozenset(
    [
        *("html", "head", "meta", "title", "style", "script", "body", "main", "h1", "h2", "h3", "p", "div", "span"),
        *("b", "i", "pre", "details", "summary", "table", "tr", "th", "td"),
    ]
)
_ATTRIBUTES = frozenset(
    ["lang", "charset", "http-equiv", "name", "content", "class", "id", "type", "open", "tabindex", "dir", "data-id"]
)
_SECRET = "of another folder"


@contextmanager
def opened() -> Iterator[Enter]:
    """Reading and drawing. Beside the folder lies a file that is not of it."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        (Path(parent) / "secret").write_text(f'{{"status": "{_SECRET}", "reason": "{_SECRET}"}}')

        def enter(data: bytes) -> str:
            shutil.rmtree(folder, ignore_errors=True)
            _unpack(data, folder)
            try:
                text = page.render(read_run(folder), plotly_js="draw()")
            except (UserError, UserErrors) as error:
                assert not [line for line in error.lines if ACTS.search(line) or "\n" in line], "no plain lines"
                return re.sub(r"[^a-z ]+", "", error.lines[0].rpartition("/")[2])[:60]
            return _judged(text)

        yield enter


def _unpack(data: bytes, folder: Path) -> None:
    """The last of one name is what counts. Links are made last: nothing is written through them."""
    (folder / "metrics").mkdir(parents=True)
    _, *parts = _FILE.split(data, maxsplit=_MOST_FILES)
    entries = {_safe(name): (kind, content) for kind, name, content in zip(*[iter(parts)] * 3, strict=True)}
    for name, (kind, content) in sorted(entries.items(), key=lambda entry: entry[1][0] == b">"):
        with contextlib.suppress(OSError):  # a name that a disk does not take
            _make(folder / ("metrics" if name.endswith(".jsonl") else "") / name, kind, content)


def _safe(name: bytes) -> str:
    name = re.sub(rb"[/\0]", b"_", name)
    return os.fsdecode(b"_" if name in (b".", b"..") else name)


def _make(path: Path, kind: bytes, content: bytes) -> None:
    match kind:
        case b">":
            shutil.rmtree(path, ignore_errors=True)
            path.symlink_to(os.fsdecode(content.partition(b"\n")[0].replace(b"\0", b"")))
        case b"|":
            os.mkfifo(path)
        case b"/":
            path.mkdir()
        case _:
            path.write_bytes(content)
            if kind == b"+":
                os.truncate(path, 1 << 40)


def _judged(text: str) -> str:
    text.encode()
    assert _SECRET not in text, "a file from elsewhere"
    found = Skeleton(text)
    for tag, attributes in found.parts:
        assert tag in _ELEMENTS, f"element {tag}"
        assert {name for name, _ in attributes} <= _ATTRIBUTES, f"attributes {attributes}"
    sources = [source for kind, source in found.scripts if "type" not in kind]
    assert sources == ["draw()", page.asset(page.DRAW_JS)], "a script of the data"
    return " ".join(str(len([tag for tag, _ in found.parts if tag == kind])) for kind in ("div", "tr"))


def plant(patch: pytest.MonkeyPatch) -> None:
    """Templates that do not escape."""
    bare = page.environment(layout="page.html")
    bare.autoescape = False
    patch.setattr(page, "_TEMPLATES", bare)


def _packed(text: str) -> bytes:
    with tempfile.TemporaryDirectory() as parent:
        folder = foreign_folder(Path(parent) / "run", text=text)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return b"".join(b"=== " + path.name.encode() + b"\n" + path.read_bytes() + b"\n" for path in files)


_NAMES = (b"job.json", b"run.json", b"result.json", b"steps.jsonl", b"scaling.jsonl", b"x.jsonl", b"metrics")
_TARGETS = (b"../secret", b"../../secret", b"/dev/zero", b"result.json", b".")
DOOR = Door(
    name="run_folder",
    opened=opened,
    honest=[_packed("text"), _packed("other")],
    words=[
        *(b"<script>", b"</script>", b"<!--", b"<img src=x onerror=y>", b"&lt;", b"'", b"{{7*7}}", b"%{y}"),
        *(b"\n==%b %b\n" % (kind, name) for kind in (b"=", b"|", b"/", b"+") for name in _NAMES),
        *(b"\n==> %b\n%b\n" % (name, target) for name in _NAMES for target in _TARGETS),
        *(b'"parts": {"busy": 1e308}', b'"from": ', b'"wall_s": ', b'"t": ', b'"reward_parts": {"a": null}'),
    ],
    most_held=64 << 20,
    most_cpu_s=20.0,
    plant=plant,
)
