"""Why vLLM does not start: what a person must change, or what may be gone at the next try.

vLLM's own process raises some errors, its core and workers the others; of those the parent hears only that a process has ended. So each of them
writes the first error that it logs into a file (`plugin.py`), and it is read here. Imports no vLLM.

| vLLM raises | it is |
|---|---|
| ValueError, TypeError, NotImplementedError, ImportError, an assertion with a text, a failed validation | what the job asks for: `UserError` |
| AttributeError at a configuration: the code of the model needs a setting that it lacks | the same |
| of these, that less memory is free than it wants, on a device which has as much | passing: others hold it |
| anything else (out of memory, a signal, a lost process) | passing: `EngineFailedError` |
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streamrl.errors import UserError
from streamrl_workers.generator.engines.base import EngineFailedError
from streamrl_workers.generator.engines.vllm.plugin import fault_of

_TAKEN = re.compile(
    r"(?:Free|Available) memory on .*?\([\d.]+/(?P<total>[\d.]+) GiB\).*?is less than .*?(?P<asked>[\d.]+) GiB\)"
)
_FREED = "Error in memory profiling"
"""Others gave memory back while vLLM measured it."""
_TOO_LONG = re.compile(r"max seq len \((?P<length>\d+)\).*? is needed, which is larger than")
_LONGEST = re.compile(r"estimated maximum model length is (?P<longest>\d+)")
_NO_SHARING = "required for mamba cache mode"
_NO_ROOM = "No available memory for the cache blocks"


def start_error(error: Exception, *, told: Path, arguments: Mapping[str, Any]) -> UserError | EngineFailedError:
    """What became of the start.

    Args:
        error: what vLLM raised in this process.
        told: the file in which its other processes may have said more.
        arguments: that vLLM was started with.
    """
    fault = json.loads(told.read_text(encoding="utf-8")) if told.exists() else fault_of(error)
    says = str(fault["says"])
    if not fault["refuses"] or _is_taken(says):
        return EngineFailedError(f"vLLM does not start; its own lines above say why: {says}")
    return _user_error(says, arguments=arguments)


def _is_taken(says: str) -> bool:
    if _FREED in says:
        return True
    found = _TAKEN.search(says)
    return found is not None and float(found["asked"]) < float(found["total"])  # all of a device is free nowhere


def _user_error(says: str, *, arguments: Mapping[str, Any]) -> UserError:
    memory = "kvCacheBytes" if arguments.get("kv_cache_memory_bytes") is not None else "gpuMemoryPercent"
    if found := _TOO_LONG.search(says):
        longest = _LONGEST.search(says)
        return UserError(
            field="engine.vllm.extraArgs.max_model_len",
            rule="the keys and values of one sequence must fit the memory for them",
            got=int(found["length"]),
            fix=f"set {'at most ' + longest['longest'] if longest else 'less'}, or raise {memory}",
        )
    if _NO_ROOM in says:
        return UserError(
            field=f"engine.vllm.{memory}",
            rule="must have room for keys and values",
            fix="raise it, or take more devices",
        )
    if _NO_SHARING in says:
        return UserError(
            field="engine.vllm.prefixCaching",
            rule="must be false on CPUs for a model with recurrent layers, whose prompts come in one piece there",
            got=True,
            fix="set it to false",
        )
    return UserError(field="engine.vllm", rule=f"is refused by vLLM: {says}", fix="change what it names")
