"""Fetches configuration and tokenizer from the scheduler, for a generator that has no model folder of its own.

Owns reconnecting, the deadline, the folder in the run folder: whole or not there. Does not own what is checked of each
file (`stream/model_pieces.py`), nor weights: those come by the pull, announced by the scheduler.
"""

import asyncio
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from streamrl.errors import UserError
from streamrl.keys import DIR_MODEL_FILES
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.generator.link import SchedulerLostError, refusal
from streamrl_workers.stream.auth import call_metadata
from streamrl_workers.stream.channel import Backoff, ConnectTimeoutError, connect
from streamrl_workers.stream.model_pieces import Arriving, ModelFilesError
from streamrl_workers.stream.stream_pb2_grpc import SchedulerStub
from streamrl_workers.stream.tls import Tls

TIMEOUT_S = 1800.0
"""The scheduler's pod may have to be placed, its image pulled, the model downloaded or warmed up first."""
_CONNECT_TIMEOUT_S = 5.0
_STALL_TIMEOUT_S = 30.0
"""Without a piece for so long, the connection is given up and made anew."""
_LONGEST_PAUSE_S = 5.0
_TELL_S = 30.0
"""Between two lines in the log about what is awaited."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The scheduler that hands the files out."""

    address: str  # host:port
    token: str
    tls: Tls | None
    timeout_s: float = TIMEOUT_S


async def fetch_model(source: Source, *, run_dir: Path) -> Path:
    """The directory with the files.

    Raises:
        SchedulerLostError: not had in time.
        UserError: the scheduler refuses us, or has no model that can be handed out.
    """
    loop = asyncio.get_running_loop()
    begun_s = told_s = loop.time()
    told = ""
    backoff = Backoff(limit_s=_LONGEST_PAUSE_S)
    while True:
        try:
            return await _attempt(source, run_dir=run_dir)
        except (ConnectTimeoutError, grpc.aio.AioRpcError, ModelFilesError, TimeoutError) as error:
            reason = _judge(error, source)
        waited_s = loop.time() - begun_s
        if waited_s >= source.timeout_s:
            raise SchedulerLostError(f"waited {waited_s:.0f} s in vain for the model's files: {reason}")
        if reason != told or loop.time() - told_s >= _TELL_S:
            told, told_s = reason, loop.time()
            _log.info("waiting for the model's files of the scheduler at %s: %s", source.address, reason)
        await backoff.pause()


async def _attempt(source: Source, *, run_dir: Path) -> Path:
    channel = await connect(source.address, timeout_s=_CONNECT_TIMEOUT_S, who="the scheduler", tls=source.tls)
    directory = run_dir / DIR_MODEL_FILES
    partial = directory.with_name(f".partial-{directory.name}")
    async with channel:
        shutil.rmtree(partial, ignore_errors=True)
        arriving = Arriving(partial)
        call = SchedulerStub(channel).GetModel(  # type: ignore[no-untyped-call]  # generated
            pb.ModelRequest(), metadata=call_metadata(source.token)
        )
        try:
            while True:
                async with asyncio.timeout(_STALL_TIMEOUT_S):
                    piece = await call.read()
                if piece is grpc.aio.EOF:
                    break
                _take(arriving, piece)
        finally:
            call.cancel()
        arriving.end()
    shutil.rmtree(directory, ignore_errors=True)  # of an earlier life of this process
    partial.rename(directory)
    _log.info("got the model's files: %s", ", ".join(arriving.names))
    return directory


def _take(arriving: Arriving, piece: pb.ModelFile) -> None:
    try:
        arriving.take(piece)
    except OSError as error:
        raise UserError(
            field=f"{DIR_MODEL_FILES} in the run folder", rule=f"cannot be written: {error}", fix="free or fix the disk"
        ) from error


def _judge(error: Exception, source: Source) -> str:
    """What the next attempt may overcome, as text; raises for the rest."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return str(error) or f"no answer for {_STALL_TIMEOUT_S:g} s"
    if (refused := refusal(error, address=source.address, tls=source.tls)) is not None:
        raise refused from None
    text = f"{error.code().name}: {error.details()}"
    if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
        raise UserError(field="spec.model", rule=f"cannot be handed to generators: {error.details()}") from None
    return text
