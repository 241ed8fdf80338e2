"""How rank 0's server of weights passes on what other ranks hold, to those who reach rank 0 alone: a generator in another cluster.

Owns asking the holder. Does not own who is let in, nor bounds of links (`http_server.py`), nor who holds what (`store.py`).

Invariants:
- One piece is in memory while it is passed on, and nothing is kept.
- Whatever is wrong with the holder ends the pieces early; whoever asked for them finds out by their number, and by their hash.
"""

import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse

from streamrl_workers.stream.auth import WEIGHTS_PATH, identity_in
from streamrl_workers.stream.tls import Tls, peer_names
from streamrl_workers.weights.hashing import HASH_ALGORITHM

_TIMEOUT_S = 20.0
"""For a holder to answer, or to send the next bytes."""
_PIECE_BYTES = 2**20
"""Passed on at once."""
_PARTIAL = 206

_log = logging.getLogger("streamrl.weights")

Find = Callable[[bytes], tuple[str, int] | None]
"""Address of the rank that holds the bytes of a hash, and their number; None: no version is kept that another rank holds them of."""


class HolderClient:
    """Reads from the servers of other ranks."""

    def __init__(self, find: Find, *, token: str, tls: Tls | None) -> None:
        self._find = find
        self._token = token
        self._tls = tls

    def size_bytes(self, content_hash: bytes) -> int | None:
        """Return the size of what another rank holds; None: no other rank does."""
        found = self._find(content_hash)
        return None if found is None else found[1]

    def pieces(self, content_hash: bytes, *, begin: int, end: int) -> Iterator[memoryview]:
        """Yield these bytes of what another rank holds; each piece is overwritten by the next one."""
        found = self._find(content_hash)
        if found is None:
            return
        buffer = memoryview(bytearray(min(_PIECE_BYTES, end - begin)))
        try:
            with self._answer(found[0], content_hash, begin=begin, end=end) as answer:
                while begin < end and (count := answer.readinto(buffer[: end - begin])):
                    yield buffer[:count]
                    begin += count
        except (OSError, HTTPException, ValueError) as error:
            _log.warning("rank at %s did not give a slice to pass on: %s", found[0], error or type(error).__name__)

    @contextmanager
    def _answer(self, address: str, content_hash: bytes, *, begin: int, end: int) -> Iterator[HTTPResponse]:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_TIMEOUT_S) as connection:
            http = HTTPConnection(address)
            http.auto_open = 0
            http.sock = connection if self._tls is None else self._secured(connection, tls=self._tls)
            headers = {"Range": f"bytes={begin}-{end - 1}", "Authorization": f"Bearer {self._token}"}
            http.request(
                "GET", f"{WEIGHTS_PATH}/v2/{HASH_ALGORITHM}/content/{content_hash.hex()}", headers=headers
            )
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
