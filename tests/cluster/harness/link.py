"""A link over which two clusters reach each other, and nothing else does: the delay line, how it is laid, how it is changed.

    python -m cluster.harness.link SOCKET  state | cut | heal | slow MBIT [RTT_MS] | lossy SHARE      (with PYTHONPATH=tests)

Each end has one address there, behind which stands all of its own network. Counts whole IP packets that came out.
"""

import json
import socket
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cluster.harness.delay_line import DEVICE, Shape, Traffic
from cluster.harness.processes import ClusterError, Server
from cluster.harness.sandbox import Sandbox

LAID_S = 60.0
ANSWER_S = 60.0
WAN = Shape(delay_s=0.02, rate_bps=200e6)
"""40 ms there and back, 200 Mbit/s."""
OUTWARD = """
table ip {device}
delete table ip {device}
table ip {device} {{
  chain outward {{ type nat hook postrouting priority srcnat; oifname "{device}" ip saddr != {ours} snat to {ours}; }}
}}
"""
"""Pods and Services of one cluster have no address in the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """One end of a link."""

    sandbox: Sandbox
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkState:
    """How a link is, and what has passed since it was laid."""

    shape: Shape
    there: Traffic
    """From its first end to the second."""
    back: Traffic


class Link:
    """Changes a link, by the socket of its delay line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def cut(self) -> LinkState:
        """Nothing passes from now on, in both directions; nobody is told."""
        return self.shape(cut=True)

    def slow(self, *, rate_bps: float, delay_s: float | None = None) -> LinkState:
        """Another rate for each direction, another delay one way."""
        return self.shape(rate_bps=rate_bps, **({} if delay_s is None else {"delay_s": delay_s}))

    def lossy(self, share: float) -> LinkState:
        """This share of packets is lost."""
        return self.shape(loss=share)

    def heal(self) -> LinkState:
        """As it was laid."""
        return self.ask(None)

    def shape(self, **changed: Any) -> LinkState:
        """Change fields of `Shape`; without any, only tell."""
        return self.ask(changed)

    def ask(self, request: dict[str, Any] | None) -> LinkState:
        """Change what the request names, nothing where it is empty; None heals."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(ANSWER_S)
            connection.connect(str(self.path))
            connection.sendall(json.dumps(request).encode())
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        if not answer:
            raise ClusterError(f"the link refused {request}")
        told = json.loads(answer)
        there, back = (Traffic(**one) for one in told["traffic"])
        return LinkState(shape=Shape(**told["shape"]), there=there, back=back)


class LaidLink(Link):
    """A link with its process, whose end is the link's."""

    def __init__(self, first: End, second: End, shape: Shape = WAN, *, folder: Path, mark: str) -> None:
        super().__init__(folder / "link.sock")
        ends = [word for end in (first, second) for word in (str(end.sandbox.pid), end.address)]
        program = Path(__file__).with_name("delay_line.py")
        command: list[str | Path] = [sys.executable, "-I", program, self.path, *ends, json.dumps(asdict(shape))]
        self._server = Server("link", command, log=folder / "link.log", mark=mark)
        self.path.unlink(missing_ok=True)
        for end in (first, second):
            end.sandbox.run("nft", "-f", "-", stdin=OUTWARD.format(device=DEVICE, ours=end.address))
        self._server.start()
        try:
            self._server.wait(self._answers, deadline_s=LAID_S)
        except BaseException:
            self.close()
            raise

    def _answers(self) -> bool:
        try:
            self.shape()
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Take it up: both ends lose the device and the way."""
        self._server.stop(kill=True)


def _request(arguments: list[str]) -> dict[str, Any] | None:
    match arguments:
        case ["state"]:
            return {}
        case ["heal"]:
            return None
        case ["cut"]:
            return {"cut": True}
        case ["slow", mbit]:
            return {"rate_bps": float(mbit) * 1e6}
        case ["slow", mbit, rtt_ms]:
            return {"rate_bps": float(mbit) * 1e6, "delay_s": float(rtt_ms) / 2000}
        case ["lossy", share]:
            return {"loss": float(share)}
    raise ValueError(arguments)


def main(arguments: list[str]) -> int:
    """Run the command line."""
    try:
        path, request = Path(arguments[0]), _request(arguments[1:])
    except (IndexError, ValueError):
        sys.stderr.write(__doc__ or "")
        return 2
    try:
        state = Link(path).ask(request)
    except (ClusterError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(json.dumps(asdict(state), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
