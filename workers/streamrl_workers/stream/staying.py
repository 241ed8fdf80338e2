"""What a process in a pod does when the run has ended: it stays, since a pod is started again when its process exits.

Owns the signals port of an ended process. Does not own what ended it.
Waits for SIGTERM (no deadline: who runs the pods ends them).
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl_workers.metrics.signals import Pages, SignalsServer
from streamrl_workers.stream.endpoint import write_endpoint
from streamrl_workers.stream.lifeline import on_terminate


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Who stays, and where its signals are read."""

    run_dir: Path
    process: str
    host: str
    port: int  # 0 = any


async def stay(place: Place, *, numbers: Mapping[str, Any]) -> None:
    """Be healthy and show `numbers` until SIGTERM.

    Raises:
        UserError: the port is in use.
    """
    asked = asyncio.Event()
    on_terminate(asyncio.get_running_loop(), asked.set)
    signals = SignalsServer(Pages(metrics=lambda: b"", numbers=lambda: numbers))
    port = await signals.start(host=place.host, port=place.port)
    try:
        write_endpoint(place.run_dir, process=place.process, grpc=None, signals=f"{place.host}:{port}")
        await asked.wait()
    finally:
        await signals.close()
