"""How rank 0's server of weights passes on what other ranks hold, to those who reach rank 0 alone: a generator in another cluster.

Owns asking the holder. Does not own who is let in, nor bounds of links (`http_server.py`), nor who holds what (`store.py`).

Invariants:
- One piece is in memory while it is passed on, and nothing is kept.
- Whatever is wrong with the holder ends the pieces early; whoever asked for them finds out by their number, and by their hash.
"""

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any

from streamrl_workers.stream.auth import identity_in
from streamrl_workers.stream.tls import Tls, peer_names
from streamrl_workers.weights.http_server import HttpWeightServer, content_path
from streamrl_workers.weights.store import WeightStore

_TIMEOUT_S = 20.0
"""For a holder to answer, or to send the next bytes."""
_PARTIAL = 206

_log = logging.getLogger("streamrl.weights")


class PassingWeightServer(HttpWeightServer):
    """Rank 0's server."""

    def __init__(
        self,
        store: WeightStore,
        *,
        token: str,
        tls: Tls | None,
        **options: Any,  # noqa: ANN401 - of `HttpWeightServer`
    ) -> None:
        self._elsewhere = store.elsewhere
        self._token = token
        self._tls = tls
        super().__init__(store, token=token, tls=tls, **options)

    def size_bytes(self, content_hash: bytes) -> int | None:
        """Return the size of a content, also of one that another rank holds."""
        own, found = super().size_bytes(content_hash), self._elsewhere(content_hash)
        return found[1] if own is None and found is not None else own

    def pieces(self, content_hash: bytes, *, begin: int, end: int) -> Iterator[memoryview]:
        """Yield bytes of a content, also of one that another rank holds."""
        for piece in super().pieces(content_hash, begin=begin, end=end):
            yield piece
            begin += len(piece)
        found = self._elsewhere(content_hash)
        if begin == end or found is None:
            return
        buffer = memoryview(bytearray(min(self.slice_bytes, end - begin)))
        try:
            with self._answer(found[0], content_hash, begin=begin, end=end) as answer:
                while begin < end and (count := answer.readinto(buffer[: end - begin])):
                    yield buffer[:count]
                    begin += count
        except (OSError, HTTPException, ValueError) as error:
            _log.warning("the rank at %s gave no slice to pass on: %s", found[0], error or type(error).__name__)

    @contextmanager
    def _answer(self, address: str, content_hash: bytes, *, begin: int, end: int) -> Iterator[HTTPResponse]:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_TIMEOUT_S) as connection:
            http = HTTPConnection(address)
            http.auto_open = 0
            http.sock = connection if self._tls is None else self._secured(connection, tls=self._tls)
            headers = {"Range": f"bytes={begin}-{end - 1}", "Authorization": f"Bearer {self._token}"}
            http.request("GET", content_path(content_hash), headers=headers)
            try:
                with http.getresponse() as answer:
                    if answer.status != _PARTIAL:
                        raise ConnectionError(f"it answered {answer.status}")
                    yield answer
            finally:
                http.close()

    def _secured(self, connection: socket.socket, *, tls: Tls) -> socket.socket:
        secured = tls.ssl_context(server=False).wrap_socket(connection, server_hostname=tls.server_name)
        peer = identity_in(peer_names(secured))
        if peer != tls.identity:  # another rank of the same trainer
            secured.close()
            raise ConnectionError(f"its certificate is of {peer or 'no role'}")
        return secured
