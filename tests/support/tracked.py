"""Reads back what trackers hold, with their own packages: name -> {step: value}."""

import json
import os
import sqlite3
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from streamrl import keys
from streamrl_workers.metrics.jsonl import read_jsonl
from streamrl_workers.trackers.scalars import evaluation_point, step_point

Series = dict[str, list[tuple[int, float]]]
TRACKERS: dict[str, dict[str, Any]] = {
    "wandb": {"mode": "Offline", "project": "tests"},
    "tensorBoard": {},
    "mlflow": {"experiment": "tests"},
    "trackio": {"project": "tests"},
}
"""All of them, on this machine alone."""


def expected(run: Path) -> Series:
    """What the run's own files say; of a step the first line."""
    found: defaultdict[str, dict[int, float]] = defaultdict(dict)
    lines = [step_point(line) for line in read_jsonl(run / keys.DIR_METRICS / "steps.jsonl")]
    lines += [evaluation_point(line) for line in read_jsonl(run / keys.DIR_METRICS / "evaluations.jsonl")]
    for point in lines:
        for name, value in point.values.items():
            found[name].setdefault(point.step, value)
    return {name: sorted(values.items()) for name, values in found.items()}


def held(run: Path, key: str) -> Series:
    """What a tracker holds, sorted by step; a step that is there twice comes twice."""
    found: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    for name, step, value in _READERS[key](run / keys.DIR_TRACKERS / key):
        found[name].append((step, value))
    return {name: sorted(values) for name, values in found.items()}


_Values = Iterator[tuple[str, int, float]]


def _tensor_board(folder: Path) -> _Values:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    for name in events.Tags()["scalars"]:
        yield from ((name, event.step, event.value) for event in events.Scalars(name))


def _mlflow(folder: Path) -> _Values:
    from mlflow import MlflowClient

    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    client = MlflowClient(tracking_uri=folder.as_uri(), registry_uri=folder.as_uri())
    experiment = client.get_experiment_by_name("tests")
    (run,) = client.search_runs([experiment.experiment_id])
    for name in run.data.metrics:
        yield from ((name, one.step, one.value) for one in client.get_metric_history(run.info.run_id, name))


def _trackio(folder: Path) -> _Values:
    import orjson

    with sqlite3.connect(folder / "tests.db") as database:
        rows = database.execute("SELECT step, metrics FROM metrics").fetchall()
    database.close()
    for step, metrics in rows:
        values: Mapping[str, Any] = orjson.loads(metrics)
        yield from ((name, step, value) for name, value in values.items() if isinstance(value, int | float))


def _wandb(folder: Path) -> _Values:
    for record in wandb_records(folder):
        if record.HasField("history"):
            values = {".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            step = values.pop("step")
            numbers = {name: value for name, value in values.items() if "/" in name}
            yield from ((name, step, value) for name, value in numbers.items())


def wandb_records(folder: Path) -> Iterator[Any]:
    """Every record of every file of the run, which is a log as LevelDB has them."""
    from wandb.proto import wandb_internal_pb2

    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        data, at, body = file.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if (left := 32768 - at % 32768) < 7:
                at += left
                continue
            _, size, kind = struct.unpack("<IHB", data[at : at + 7])
            body, at = body + data[at + 7 : at + 7 + size], at + 7 + size
            if kind in (1, 4):  # whole, or its last part
                yield wandb_internal_pb2.Record.FromString(body)
                body = b""


_READERS = {"tensorBoard": _tensor_board, "mlflow": _mlflow, "trackio": _trackio, "wandb": _wandb}
