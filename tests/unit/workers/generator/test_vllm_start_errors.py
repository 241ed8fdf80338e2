"""Which errors of vLLM's start are the user's, by vLLM's own words, and how they come from its other processes."""

import logging
from pathlib import Path

import pytest

from streamrl.errors import UserError
from streamrl_workers.generator.engines.base import EngineFailedError
from streamrl_workers.generator.engines.vllm.plugin import FirstFault
from streamrl_workers.generator.engines.vllm.start_errors import start_error

TOO_LONG = (
    "To serve at least one request with the model's max seq len (32768), (7.0 GiB KV cache is needed, which is larger than the available KV cache "
    "memory (1.0 GiB). Based on the available memory, the estimated maximum model length is 4672. Try increasing `gpu_memory_utilization`"
)
TOO_LONG_FOR_ANY = TOO_LONG.replace("Based on the available memory, the estimated maximum model length is 4672. ", "")
NO_ROOM = (
    "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine"
)
BUSY_GPU = (
    "Free memory on device cuda:0 (11.2/79.1 GiB) on startup is less than desired GPU memory utilization (0.9, 71.2 GiB). "
    "Decrease GPU memory utilization or reduce GPU memory used by other processes."
)
ALL_OF_A_GPU = BUSY_GPU.replace("(0.9, 71.2 GiB)", "(1.0, 79.1 GiB)")
BUSY_MACHINE = "Available memory on node 0 (3.1/16.0 GiB) on kv cache allocation is less than requested memory for kv (8.0 GiB). Decrease"
NEVER_ON_THIS_MACHINE = BUSY_MACHINE.replace("(8.0 GiB)", "(900.0 GiB)")
LENGTH = "engine.vllm.extraArgs.max_model_len: the keys and values of one sequence must fit the memory for them, got 32768; set"


class LfConfig:
    """A configuration, as vLLM names their classes."""


ENDED = RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}")


@pytest.mark.parametrize(
    ("error", "arguments", "line"),
    [
        (ValueError(TOO_LONG), {"kv_cache_memory_bytes": 1}, f"{LENGTH} at most 4672, or raise kvCacheBytes"),
        (ValueError(TOO_LONG), {}, f"{LENGTH} at most 4672, or raise gpuMemoryPercent"),
        (ValueError(TOO_LONG_FOR_ANY), {}, f"{LENGTH} less, or raise gpuMemoryPercent"),
        (
            ValueError(NO_ROOM),
            {},
            "engine.vllm.gpuMemoryPercent: must have room for keys and values; raise it, or take more devices",
        ),
        (
            ValueError("Unknown quantization\n  method: foo"),
            {},
            "engine.vllm: is refused by vLLM: Unknown quantization method: foo; change what it names",
        ),
        (
            ValueError("Assertion failed, Chunked prefill is required for mamba cache mode 'align'."),
            {},
            "engine.vllm.prefixCaching: must be false on CPUs for a model with recurrent layers, whose prompts come in one piece there, "
            "got true; set it to false",
        ),
        (
            AssertionError("CPU GDN attention requires BF16."),
            {},
            "engine.vllm: is refused by vLLM: CPU GDN attention requires BF16.; change what it names",
        ),
        (
            NotImplementedError("supported only for CUDA for now"),
            {},
            "engine.vllm: is refused by vLLM: supported only for CUDA for now; change what it names",
        ),
        (
            AttributeError("'LfConfig' object has no attribute 'dim'", name="dim", obj=LfConfig()),
            {},
            "engine.vllm: is refused by vLLM: 'LfConfig' object has no attribute 'dim'; change what it names",
        ),
        (TypeError("no such backend"), {}, "engine.vllm: is refused by vLLM: no such backend; change what it names"),
        (ValueError(ALL_OF_A_GPU), {}, f"engine.vllm: is refused by vLLM: {ALL_OF_A_GPU}; change what it names"),
        (ValueError(NEVER_ON_THIS_MACHINE), {}, f"engine.vllm: is refused by vLLM: {NEVER_ON_THIS_MACHINE}; change what it names"),
    ],
)  # fmt: skip
def test_what_a_person_must_change(
    *, error: Exception, arguments: dict[str, object], line: str, tmp_path: Path
) -> None:
    """The same, whether vLLM raises it in the generator's process or in one of its own."""
    for told in (tmp_path / "nobody", told_by_another_process(error, folder=tmp_path)):
        raised = error if not told.exists() else ENDED
        became = start_error(raised, told=told, arguments=arguments)
        assert isinstance(became, UserError)
        assert became.lines == [line]


@pytest.mark.parametrize(
    "error",
    [
        ValueError(BUSY_GPU),
        ValueError(BUSY_MACHINE),
        AssertionError("Error in memory profiling. Initial free memory 3 GiB, current free memory 4 GiB."),
        AssertionError(),
        MemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("NCCL error: unhandled system error"),
        AttributeError("'NoneType' object has no attribute 'recv'", name="recv", obj=None),
    ],
)
def test_what_another_try_may_mend(error: Exception, tmp_path: Path) -> None:
    became = start_error(ENDED, told=told_by_another_process(error, folder=tmp_path), arguments={})
    assert isinstance(became, EngineFailedError)
    assert str(error) in str(became)


def test_the_first_error_is_the_cause(tmp_path: Path) -> None:
    """A worker says why; the core and the parent only that another process has ended."""
    told = told_by_another_process(ValueError(TOO_LONG), RuntimeError("a worker failed"), folder=tmp_path)
    assert isinstance(start_error(ENDED, told=told, arguments={}), UserError)


def test_a_process_that_says_nothing_may_be_started_again(tmp_path: Path) -> None:
    assert isinstance(start_error(ENDED, told=tmp_path / "nobody", arguments={}), EngineFailedError)


def told_by_another_process(*errors: Exception, folder: Path) -> Path:
    """What vLLM's processes leave behind when they log these; lines without an exception are not told."""
    told = folder / "fault.json"
    log = logging.Logger("vllm of a test")
    log.addHandler(FirstFault(told))
    log.error("a line alone")
    for error in errors:
        log.error("failed to start", exc_info=error)
    return told
