"""A job file in `streamrl validate`: a verdict and one plain line for each mistake, whatever the YAML says."""

import contextlib
import io
import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import strategies as st

from fuzz.harness import Door, Enter
from fuzz.inputs import SIZES, VALUES
from streamrl_cli import yaml_document
from streamrl_cli.main import main
from support.hostile import ACTS
from support.jobs import simulated_job
from support.tree import ROOT


@contextmanager
def opened() -> Iterator[Enter]:
    """The command in this process, on a file of the input."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.yaml"

        def enter(data: bytes) -> str:
            path.write_bytes(data)
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = main(["validate", "--spec-only", str(path)])
            said = out.getvalue() + err.getvalue()
            assert code in (0, 2), code
            assert not ACTS.search(said), "control characters"
            assert (code == 0) == (not err.getvalue()), "a refusal says why"
            rules = {re.sub(r"[^a-z ]+", "", line.partition(":")[2])[:40] for line in said.splitlines()}
            return " ".join(sorted(rules)[:3])

        yield enter


def plant(patch: pytest.MonkeyPatch) -> None:
    """Characters that are not counted."""
    patch.setattr(yaml_document, "MAX_CHARS", 1 << 60)


@st.composite
def _aliased(draw: st.DrawFn) -> bytes:
    """A text, in lists that hold the one before them again and again, by its name."""
    value = b'&a0 "%b"' % (b"x" * draw(st.sampled_from([1, 30_000])))
    for level in range(draw(st.integers(1, 3))):
        form = draw(st.sampled_from([b"*a%d ", b"{k: *a%d }"]))
        again = [form % level] * draw(SIZES)
        value = b"&a%d [%b]" % (level + 1, b",".join([value, *again]))
    return value


DOOR = Door(
    name="job_file",
    opened=opened,
    honest=[
        json.dumps(simulated_job()).encode(),
        json.dumps(yaml_document.read_value((ROOT / "examples/chain-sum.yaml").read_text())).encode(),
        json.dumps({"a": 1, "b": [{"c": "x"}]}).encode(),
        b"base: &a {k: x}\nlist: &b [*a, *a]\nmore: {<<: *a, l: 1}\nlists: [*b, *b]\n",
        b"a: 0x1f\nb: [1e-6, .5, ~, yes, 'it''s', \"\\u00fc\"]\nc: |\n  text\n  more\nd: >-\n  folded\n---\n? x\n: y\n",
    ],
    words=[
        *(b"&a ", b"*a, ", b"*b, ", b"<<: *a\n", b"<<: [*a, *a]\n", b"!!str ", b"!!python/name:os.system ", b"---\n"),
        *(b"- ", b": ", b"? ", b"|\n", b">\n", b"%YAML 1.1\n", b"\t", b"\xef\xbb\xbf", b'"\\x1b[2J"', b".inf", b".nan"),
        *(b"\xc2\x85", b"\xe2\x80\xa8", b"\xe2\x80\xae", b"\x1b]52;c;eA==\x07", b"{", b"}", b"[", b"]", b"'", b'"'),
    ],
    values=VALUES | _aliased() | _aliased(),  # a third of them: aliases are what YAML has beyond JSON
    most_input=256 << 10,
    most_held=256 << 20,  # of 32 Mi characters, once as data and once as JSON
    most_cpu_s=30.0,
    plant=plant,
)
