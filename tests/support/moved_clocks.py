"""Wall clocks of a run's processes that a test moves while they run, by a small library that is preloaded (`moved_clock.c`)."""

import os
import struct
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from support.runs import COMMAND_S

SOURCE = Path(__file__).with_name("moved_clock.c")
ALL = 0
"""Entry of all processes."""
_ENTRY = struct.Struct("qqq")
STOPPED = 1 << 62
"""Seconds that a clock takes for one."""
_ENTRIES = 1 << 22
"""As many as there can be process ids."""


@dataclass(frozen=True, slots=True)
class MovedClocks:
    """The table that those processes read."""

    table: Path

    @classmethod
    def make(cls, folder: Path) -> "MovedClocks":
        """With clocks that are right."""
        clocks = cls(folder / "clocks")
        with clocks.table.open("wb") as file:
            file.truncate(_ENTRIES * _ENTRY.size)  # sparse
        command = ["cc", "-shared", "-fPIC", "-O2", "-o", str(folder / "moved_clock.so"), str(SOURCE), "-ldl"]
        subprocess.run(command, check=True, timeout=COMMAND_S)
        return clocks

    @property
    def environment(self) -> dict[str, str]:
        """Of the processes whose clocks move."""
        return {"LD_PRELOAD": str(self.table.with_name("moved_clock.so")), "CLOCK_TABLE": str(self.table)}

    def move(self, pid: int, *, by_s: float = 0.0, slow_by: int = 0) -> None:
        """Set a process's clock, from its true time; a slow one takes so many seconds for one from now on."""
        entry = _ENTRY.pack(round(by_s * 1e9), time.time_ns(), slow_by)
        with self.table.open("r+b") as file:
            os.pwrite(file.fileno(), entry, pid * _ENTRY.size)
