"""Open ports of processes, as the kernel lists them: the owner of a socket is whoever holds a descriptor of it."""

import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

import psutil

from streamrl.keys import ENV_PROCESS

_LISTEN = "0A"
"""State of a TCP socket in /proc/net/tcp."""
_LISTENING = 0x10000
"""Flag of a Unix socket in /proc/net/unix."""


@dataclass(frozen=True, slots=True, order=True)
class Listener:
    """A TCP port and a process that has it open."""

    process: str
    host: str
    port: int
    pid: int

    def __str__(self) -> str:
        return f"{self.process} {self.host}:{self.port}"


def tree(*roots: int) -> list[psutil.Process]:
    """The processes and all that they have started."""
    found = [psutil.Process(pid) for pid in roots]
    return [*found, *(child for one in found for child in one.children(recursive=True))]


def listeners(processes: Iterable[psutil.Process]) -> list[Listener]:
    """List their TCP ports. One that several processes hold is of the first: a child may have it by inheritance."""
    ports = {inode: (host, port) for file in ("tcp", "tcp6") for inode, host, port in _tcp(Path("/proc/net") / file)}
    found: dict[str, Listener] = {}
    for process in processes:
        for inode in _sockets(process) & ports.keys() - found.keys():
            found[inode] = Listener(_name(process), *ports[inode], process.pid)
    return sorted(found.values())


def abstract_sockets(processes: Iterable[psutil.Process]) -> list[str]:
    """List their listening Unix sockets that are no files: whoever knows the name may connect to one."""
    held = {inode for process in processes for inode in _sockets(process)}
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [fields[7] for fields in lines if len(fields) == 8 and fields[7].startswith("@") and _listens(fields, held)]


def _listens(fields: list[str], held: set[str]) -> bool:
    return bool(int(fields[3], 16) & _LISTENING) and fields[6] in held


def _tcp(file: Path) -> Iterator[tuple[str, str, int]]:
    for fields in map(str.split, file.read_text().splitlines()[1:]):
        if fields[3] == _LISTEN:
            host, _, port = fields[1].partition(":")
            yield fields[9], _address(host), int(port, 16)


def _address(text: str) -> str:
    """Each four bytes stand in the machine's order."""
    words = [socket.htonl(int(text[place : place + 8], 16)).to_bytes(4) for place in range(0, len(text), 8)]
    if len(words) == 1:
        return str(IPv4Address(words[0]))
    whole = IPv6Address(b"".join(words))
    return str(whole.ipv4_mapped or whole)


def _sockets(process: psutil.Process) -> set[str]:
    found = set()
    try:
        for entry in Path(f"/proc/{process.pid}/fd").iterdir():
            target = str(entry.readlink())
            if target.startswith("socket:["):
                found.add(target[len("socket:[") : -1])
    except (FileNotFoundError, ProcessLookupError):
        return found  # it has ended, or closed this one
    return found


def _name(process: psutil.Process) -> str:
    """Name in the run, and module."""
    command = process.cmdline()
    module = command[command.index("-m") + 1] if "-m" in command else Path(command[0]).name
    return " ".join(filter(None, [process.environ().get(ENV_PROCESS), module]))
