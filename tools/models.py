"""Measures the table of models, `cli/streamrl_cli/models.json`. Exits with 1 if a cell is wrong.

    PYTHONPATH=tests .venv/bin/python tools/models.py [--families qwen3,gemma3] [--columns trainer,hf] [--output FILE]

Each family and environment is a process of its own: engine vllm runs in `.venv-vllm`. What is not chosen stays as it is in FILE.
"""

import argparse
import datetime
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from streamrl_cli.model_table import COLUMNS, NOT_RUN, shape_of

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "cli/streamrl_cli/models.json"
VLLM_PYTHON = ROOT / ".venv-vllm/bin/python"
CELL_S = 900.0
"""Maximum time of a cell, in seconds."""


def main() -> int:
    """Measure the cells that are chosen, and write the table after each family."""
    from support.model_families import ALL_FAMILIES, TABLE_ORDER, tiny_config

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(TABLE_ORDER))
    parser.add_argument("--columns", default=",".join(COLUMNS))
    parser.add_argument("--output", type=Path, default=TABLE)
    args = parser.parse_args()
    old = json.loads(args.output.read_text()) if args.output.is_file() else {"families": {}}
    rows: dict[str, Any] = {}
    for name in TABLE_ORDER:
        shape = shape_of(tiny_config(name).to_dict())
        cells = old["families"].get(name, {}).get("cells", {})
        rows[name] = {"shape": {one: getattr(shape, one) for one in shape.__slots__}, "cells": cells}
    assert rows.keys() == ALL_FAMILIES.keys()
    is_wrong = False
    for name in args.families.split(","):
        for cell in measured(name, args.columns.split(",")):
            column = cell.pop("column")
            is_wrong |= cell["state"] == "wrong"
            sys.stdout.write(f"{name} {column}: {cell['state']} {cell['text']}\n")
            rows[name]["cells"][column] = cell
        document = {
            "date": str(datetime.datetime.now(tz=datetime.UTC).date()),
            "versions": versions(),
            "families": rows,
        }
        args.output.write_text(json.dumps(document, indent=1) + "\n")
    return int(is_wrong)


def versions() -> dict[str, str]:
    """Return the versions of the libraries that compute."""
    found = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "peft")}
    for path in VLLM_PYTHON.parents[1].glob("lib/python*/site-packages/vllm*.dist-info"):
        found["vllm"] = path.name.removesuffix(".dist-info").rpartition("-")[2]
    return found


def measured(family: str, columns: Sequence[str]) -> Iterator[dict[str, str]]:
    """Yield the cells of a family; a column that has no environment is left out."""
    own = [column for column in columns if column != "vllm"]
    for python, some in ((Path(sys.executable), own), (VLLM_PYTHON, ["vllm"] if "vllm" in columns else [])):
        if some and python.is_file():
            yield from _process(python, family, some)


def _process(python: Path, family: str, columns: Sequence[str]) -> Iterator[dict[str, str]]:
    command = [str(python), "-m", "support.model_cells", family, *columns]
    process = subprocess.Popen(command, cwd=ROOT / "tests", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output, errors = process.communicate(timeout=CELL_S * len(columns))
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
    cells = [json.loads(line) for line in output.splitlines() if line.startswith('{"column"')]
    yield from cells
    for column in columns[len(cells) : len(cells) + 1]:
        last = (errors.splitlines() or [NOT_RUN])[-1]
        yield {"column": column, "state": "wrong", "text": f"the process ended with {process.returncode}: {last}"}


if __name__ == "__main__":
    sys.exit(main())
