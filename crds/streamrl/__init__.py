"""The StreamRL contract: what users write and what the parts say to each other.

Owns the RLJob specification, the protocol messages, the names of environment variables and files,
and the error that users see. Depends on the standard library, pydantic and protobuf alone, so that
the operator, the workers and the command line can share it at no cost.
"""

from importlib import import_module
from importlib.metadata import entry_points

__version__ = "0.1.0"

API_GROUP = "streamrl.io"
API_VERSION = f"{API_GROUP}/v1alpha1"

_LIBRARY = ("Event", "Job", "Metrics", "Run", "load", "open_run")


def __getattr__(name: str) -> object:
    """Find what a script or a notebook uses (`streamrl.load("job.yaml").run()`) when it is asked for: the contract imports no runner."""
    if name == "RLJob":
        job: object = import_module("streamrl.spec").RLJob
        return job
    doors = entry_points(group="streamrl.library") if name in _LIBRARY else ()
    for door in doors:
        found: object = getattr(door.load(), name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((*globals(), "RLJob", *_LIBRARY))
