"""An HTTP proxy that tunnels (CONNECT): all that is asked for leads to one port of this machine. Runs in a thread, so that other processes may use it."""

import socket
import threading
from types import TracebackType
from typing import Self


class ConnectProxy:
    """Counts the tunnels, by the address that was asked for."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.tunnels: list[str] = []

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            asked = b""
            while b"\r\n\r\n" not in asked:
                part = client.recv(2**16)
                if not part:
                    return
                asked += part
            method, address, _ = asked.split(b" ", 2)
            if method != b"CONNECT":
                client.sendall(b"HTTP/1.1 405 Only CONNECT\r\nContent-Length: 0\r\n\r\n")
                return
            self.tunnels.append(address.decode())
            with socket.create_connection(("127.0.0.1", self._port)) as server:
                client.sendall(b"HTTP/1.1 200 Connected\r\n\r\n")
                back = threading.Thread(target=_pipe, args=(server, client), daemon=True)
                back.start()
                _pipe(client, server)
                back.join()


def _pipe(source: socket.socket, target: socket.socket) -> None:
    try:
        while part := source.recv(2**16):
            target.sendall(part)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        return
