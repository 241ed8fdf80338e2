"""`GetModel`: hands configuration and tokenizer of the initial model to generators that have no model folder of their own.

Owns the RPC's status codes. Does not own which files go (`stream/model_pieces.py`), nor where the model is.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import grpc.aio

from streamrl.errors import UserError
from streamrl.keys import ENV_MODEL_PATH, ENV_SHARED_DIR, FILE_MODEL
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.stream.admission import Context
from streamrl_workers.stream.model_pieces import ModelFilesError, model_files, pieces

_UNREADY = f"the model is not ready: neither {ENV_MODEL_PATH} nor {FILE_MODEL} in {ENV_SHARED_DIR} says where it is"


class ModelFiles:
    """Reads the files when somebody asks: that is rare, and they are small."""

    def __init__(self, place: Callable[[], str | None]) -> None:
        """`place`: the model's directory, once it is known."""
        self._place = place

    async def serve(self, _request: pb.ModelRequest, context: Context) -> AsyncIterator[pb.ModelFile]:
        """The RPC."""
        try:
            place = self._place()
            if place is None:
                await context.abort(grpc.StatusCode.UNAVAILABLE, _UNREADY)
            directory = Path(place or "")
            for path in await asyncio.to_thread(model_files, directory):
                for piece in await asyncio.to_thread(_read, path, directory):
                    yield piece
        except (ModelFilesError, UserError) as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except OSError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"the model cannot be read: {error}")


def _read(path: Path, directory: Path) -> list[pb.ModelFile]:
    return list(pieces(path, directory=directory))
