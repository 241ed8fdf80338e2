"""Requests for an engine, with what a test does not care about filled in."""

from collections.abc import Sequence
from typing import Any

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.stream.packing import pack_int32


def sampling(**changes: Any) -> pb.Sampling:
    """All tokens at temperature 1, up to 20, but for `changes`."""
    return pb.Sampling(**{"temperature": 1.0, "top_p": 1.0, "max_tokens": 20, **changes})


def request(
    lease: int,
    prompt: str = "p",
    *,
    prefix: Sequence[int] = (),
    limits: pb.Sampling | None = None,
    **fields: Any,
) -> pb.SampleRequest:
    """One sample to generate behind `prefix`; `limits` None: as `sampling()` has them."""
    return pb.SampleRequest(
        lease=lease, prompt=prompt, prefix_tokens=pack_int32(prefix), sampling=limits or sampling(), **fields
    )
