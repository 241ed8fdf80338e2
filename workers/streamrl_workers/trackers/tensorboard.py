"""TensorBoard: event files in `trackers/tensorBoard/` of the run folder.

    tensorboard --logdir RUN/trackers/tensorBoard

Each process writes a file of its own. It begins with a start at the first step that no earlier process is known to have told: readers then leave
out what that one told of later steps before it died, so every step is there once.
"""

import json
import time
from collections.abc import Sequence
from itertools import chain

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from streamrl.spec.trackers import TensorBoardTracker
from streamrl_workers.trackers.registry import SAMPLE_COLUMNS, Outcome, SampleRow, ScalarPoint, TrackedRun

_TEXT = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))


class TensorBoardRun:
    """A run as event files."""

    def __init__(self, run: TrackedRun) -> None:
        self._writer = EventFileWriter(str(run.folder))
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=run.next_step, session_log=start))
        if not run.next_step:
            self._text("config", json.dumps(run.config, indent=2).replace("\n", "\n\t"), step=0)

    def scalars(self, points: Sequence[ScalarPoint]) -> None:
        """An event a step."""
        for point in points:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
            self._writer.add_event(Event(wall_time=point.time_s, step=point.step, summary=Summary(value=values)))

    def samples(self, rows: Sequence[SampleRow], *, step: int) -> None:
        """A table in Markdown."""
        lines = [" | ".join(SAMPLE_COLUMNS), " | ".join("---" for _ in SAMPLE_COLUMNS)]
        self._text("samples", "\n".join(chain(lines, (" | ".join(map(_cell, row)) for row in rows))), step=step)

    def flush(self) -> None:
        """Write what waits."""
        self._writer.flush()

    def close(self, outcome: Outcome | None) -> None:
        """Write what waits; an event file does not say how a run ended."""
        del outcome
        self._writer.close()

    def _text(self, tag: str, text: str, *, step: int) -> None:
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()], tensor_shape=shape)
        value = Summary.Value(tag=tag, tensor=tensor, metadata=_TEXT)
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=[value])))


def _cell(value: object) -> str:
    text = "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", "<br>")


def open_run(options: TensorBoardTracker, *, run: TrackedRun) -> TensorBoardRun:
    """Go on with the run in a file of its own."""
    del options
    return TensorBoardRun(run)
