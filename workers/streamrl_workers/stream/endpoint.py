"""Where each process of a run listens: `endpoints/<process>.json`.

Written by each worker once its ports are bound, read by the runner. Ports may be chosen by the
system, so nobody knows them before.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from streamrl.keys import DIR_ENDPOINTS
from streamrl_workers.stream.files import write_json_atomically


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Addresses of one process. `grpc` None: it serves none."""

    grpc: str | None
    """host:port"""
    signals: str | None
    """host:port"""
    pid: int


def write_endpoint(run_dir: Path, *, process: str, grpc: str | None, signals: str | None) -> Endpoint:
    """Publish this process's addresses."""
    endpoint = Endpoint(grpc=grpc, signals=signals, pid=os.getpid())
    write_json_atomically(endpoint_path(run_dir, process), asdict(endpoint))
    return endpoint


def read_endpoint(run_dir: Path, process: str) -> Endpoint | None:
    """Addresses of `process`; None if it has not published any yet."""
    try:
        document = json.loads(endpoint_path(run_dir, process).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return Endpoint(**document)


def endpoint_path(run_dir: Path, process: str) -> Path:
    """File of one process."""
    return run_dir / DIR_ENDPOINTS / f"{process}.json"
