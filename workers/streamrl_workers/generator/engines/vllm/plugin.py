"""What vLLM loads in each of its processes, by the entry point `vllm.general_plugins`.

Registers the weight engine by name and ties the process to the generator that started it. Imports nothing heavy: vLLM's processes import it first.
"""

import ctypes
import multiprocessing
import os
import signal

WEIGHT_ENGINE = "streamrl_file"
PLUGIN = "streamrl"
"""Name of the entry point."""

REFUSED = "refused before the model was touched"
"""Begins the text of an error of an update after which the old weights are whole."""

_PR_SET_PDEATHSIG = 1


def register() -> None:
    """Called by vLLM, maybe several times in a process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if WEIGHT_ENGINE not in WeightTransferEngineFactory._registry:
        module = "streamrl_workers.generator.engines.vllm.weight_engine"
        WeightTransferEngineFactory.register_engine(WEIGHT_ENGINE, module, "FileWeightEngine")
    _end_with_parent()


def _end_with_parent() -> None:
    """vLLM's processes outlive a parent that is killed; the kernel is asked to end them too.

    It does so when the *thread* ends that started this process: `async_engine.py` keeps one for it.
    """
    parent = multiprocessing.parent_process()
    if parent is None:  # the generator itself
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:  # it had ended before
        os._exit(1)
