"""First process of a node's namespaces: mounts what the node needs for itself, then starts and reaps what it is told to.

Run by `sandbox.py` under `unshare`; needs the standard library alone, so that it starts in a tenth of a second.
Consumes: one JSON command per line on standard input. Produces: one JSON answer per line on standard output.
Waits for: commands and ends of children. Unblocked by: the other end of standard input, also when it closes: then
this process ends, and with it the kernel kills all others in its PID namespace, unmounts, and removes the network.
"""

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

KEPT_SYSCTLS = ("kernel/panic", "kernel/panic_on_oops", "vm/overcommit_memory", "vm/panic_on_oom")
"""The kubelet sets these and the kernel has one of each for the whole machine: here it writes into copies."""
OWN_COPIES = ("/var/lib",)
"""Where kubelet and CNI make directories whatever they are told."""
SYSCTLS = {"net/ipv4/ip_forward": "1", "net/bridge/bridge-nf-call-iptables": "1"}
"""Of the node's own network namespace: pods of one bridge are seen by the forward hook, where policies stand."""


def prepare(folder: Path, *, name: str) -> int:
    """Mount and set what is the node's own; returns this process's number as the machine outside sees it."""
    outer_pid = int(Path("/proc/self").readlink().name)
    run("mount", "--make-rshared", "/")
    run("mount", "-t", "proc", "proc", "/proc")
    run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
    Path("/run/netns").mkdir()
    run("mount", "--bind", str(folder / "log"), "/var/log")
    for place in OWN_COPIES:
        overlay(folder / "own" / place.strip("/").replace("/", "-"), place)
    for sysctl in KEPT_SYSCTLS:
        keep(folder / "sysctls" / sysctl, real=Path("/proc/sys") / sysctl)
    for sysctl, value in SYSCTLS.items():
        (Path("/proc/sys") / sysctl).write_text(value)
    run("ip", "link", "set", "lo", "up")
    socket.sethostname(name)
    return outer_pid


def overlay(copy: Path, place: str) -> None:
    """What is written at a place from now on lies in `copy`; what was there is seen as before."""
    upper, work = copy / "upper", copy / "work"
    upper.mkdir(parents=True)
    work.mkdir()
    run("mount", "-t", "overlay", "overlay", "-o", f"lowerdir={place},upperdir={upper},workdir={work}", place)


def keep(copy: Path, *, real: Path) -> None:
    """Put a plain file over a setting of the whole machine."""
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(real.read_text())
    run("mount", "--bind", str(copy), str(real))


def run(*argv: str) -> None:
    subprocess.run(argv, check=True, stdout=sys.stderr)


class Services:
    """The processes that were started by name, and how they ended."""

    def __init__(self) -> None:
        self.pids: dict[str, int] = {}
        self.codes: dict[str, int] = {}

    def start(self, command: dict[str, Any]) -> dict[str, Any]:
        log = os.open(command["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            pid = os.posix_spawn(
                command["argv"][0],
                command["argv"],
                {**os.environ, **command["env"]},
                file_actions=[(os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2), (os.POSIX_SPAWN_CLOSE, 0)],
                setsid=True,
                setsigmask=(),
                setsigdef=(signal.SIGCHLD,),
            )
        finally:
            os.close(log)
        self.codes.pop(command["name"], None)
        self.pids[command["name"]] = pid
        return {"pid": pid}

    def send(self, command: dict[str, Any]) -> dict[str, Any]:
        if command["name"] in self.pids and command["name"] not in self.codes:
            os.kill(self.pids[command["name"]], command["signal"])
        return {}

    def ended(self, _command: dict[str, Any]) -> dict[str, Any]:
        return {"codes": self.codes}

    def reap(self) -> None:
        """Take every child that ended: services, and what they left to us."""
        names = {pid: name for name, pid in self.pids.items()}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in names:
                self.codes[names[pid]] = os.waitstatus_to_exitcode(status)


def answer(services: Services, line: bytes) -> None:
    command = json.loads(line)
    act = {"start": services.start, "send": services.send, "ended": services.ended}[command["do"]]
    try:
        reply = act(command)
    except OSError as error:
        reply = {"error": str(error)}
    say(reply)


def say(reply: dict[str, Any]) -> None:
    os.write(1, json.dumps(reply).encode() + b"\n")


def serve(services: Services) -> None:
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    os.set_blocking(wake_read, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write)
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    selector.register(wake_read, selectors.EVENT_READ)
    pending = b""
    while True:
        for key, _ in selector.select():
            if key.fd == wake_read:
                os.read(wake_read, 4096)
                services.reap()
                continue
            data = os.read(0, 65536)
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                answer(services, line)


if __name__ == "__main__":
    # The kernel ignores signals for the first process of a PID namespace that it has no handler for.
    say({"pid": prepare(Path(sys.argv[1]), name=sys.argv[2])})
    serve(Services())
    # Else connections whose other end is gone keep the network, and its devices outside, for two minutes.
    (Path("/proc/sys") / "net/ipv4/tcp_orphan_retries").write_text("1")
