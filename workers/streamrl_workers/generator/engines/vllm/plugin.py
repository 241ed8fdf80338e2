"""What vLLM loads in each of its processes, by the entry point `vllm.general_plugins`.

Registers the weight engine by name, ties the process to the generator that started it, and tells it of the first error. Imports nothing heavy: vLLM's processes import it first.
"""

import atexit
import ctypes
import gc
import json
import logging
import multiprocessing
import os
import re
import signal
import textwrap
from pathlib import Path
from typing import Any

WEIGHT_ENGINE = "streamrl_file"
PLUGIN = "streamrl"
"""Name of the entry point."""

ENV_FAULT_FILE = "STREAMRL_VLLM_FAULT_FILE"
"""Set by the generator, read by vLLM's processes: where the first error goes."""

_REFUSALS = (ValueError, TypeError, NotImplementedError, ImportError)
"""How vLLM says that it cannot do what it was asked for."""
_REFUSED = re.compile(r"\[weights refused: (?P<reason>.*)\]")
_REASON_CHARS = 300
_PR_SET_PDEATHSIG = 1


def register() -> None:
    """Called by vLLM, maybe several times in a process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if WEIGHT_ENGINE not in WeightTransferEngineFactory._registry:
        module = "streamrl_workers.generator.engines.vllm.weight_engine"
        WeightTransferEngineFactory.register_engine(WEIGHT_ENGINE, module, "FileWeightEngine")
    if multiprocessing.parent_process() is not None:  # else it is the generator itself
        _end_with_parent()
        # vLLM unfreezes its heap at the end. To search it for garbage as the interpreter ends takes longer than vLLM gives a process.
        atexit.unregister(gc.freeze)
        atexit.register(gc.freeze)
        log, file = logging.getLogger("vllm"), os.environ.get(ENV_FAULT_FILE)
        if file and not any(isinstance(handler, FirstFault) for handler in log.handlers):
            log.addHandler(FirstFault(Path(file)))


def file_identity(path: Path) -> list[int]:
    """Tells a file from every other one, and from itself once somebody has written to it."""
    found = path.stat()
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns]


def refused(reason: str) -> str:
    """Return the text of an error that would come again with the same weights: it crosses processes as text alone."""
    return f"[weights refused: {textwrap.shorten(reason, _REASON_CHARS, placeholder='…')}]"


def refusal_in(text: str) -> str | None:
    """Return the reason that `refused` put into the text of an error."""
    found = _REFUSED.search(text)
    return found["reason"] if found else None


class FirstFault(logging.Handler):
    """Keeps the first error that vLLM's processes log with its exception: of one there the generator hears only that a process has ended."""

    def __init__(self, file: Path) -> None:
        super().__init__(logging.ERROR)
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        """Written whole or not at all; the first of all processes is the cause."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None or self._file.exists():
            return
        beside = self._file.with_suffix(f".{os.getpid()}")
        try:
            beside.write_text(json.dumps(fault_of(error)), encoding="utf-8")
            os.link(beside, self._file)
            beside.unlink()
        except OSError:  # another process was first, or the generator has gone
            return


def fault_of(error: BaseException) -> dict[str, Any]:
    """As it crosses processes. `refuses`: vLLM cannot do what it was asked for. `says`: on one line."""
    is_asserted = isinstance(error, AssertionError) and bool(str(error))
    return {"refuses": isinstance(error, _REFUSALS) or is_asserted or _lacks_setting(error), "says": _says(error)}


def _lacks_setting(error: BaseException) -> bool:
    """Return whether vLLM's code for a model reads a setting that its configuration does not have."""
    return isinstance(error, AttributeError) and type(error.obj).__name__.endswith("Config")


def _says(error: BaseException) -> str:
    """Of a failed validation by pydantic its first part."""
    parts = getattr(error, "errors", None)
    if not callable(parts):
        return " ".join(str(error).split()) or type(error).__name__
    first = parts()[0]
    place, text = ".".join(map(str, first["loc"])), str(first["msg"]).removeprefix("Value error, ")
    return f"{place}: {text}" if place else text


def _end_with_parent() -> None:
    """vLLM's processes outlive a parent that is killed; the kernel is asked to end them too.

    It does so when the *thread* ends that started this process: `async_engine.py` keeps one for it.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:  # it had ended before
        os._exit(1)
