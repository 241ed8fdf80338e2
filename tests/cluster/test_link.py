"""A link between two network namespaces: what passes, when, how it is counted; cut, healed, slowed, lossy, taken up."""

import contextlib
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.harness import reaper
from cluster.harness.delay_line import DEVICE, Shape
from cluster.harness.link import End, LaidLink
from cluster.harness.processes import wait_until
from cluster.harness.sandbox import Sandbox

pytestmark = [pytest.mark.node, pytest.mark.timeout(300)]

HERE, THERE = "10.201.0.1", "10.201.1.1"
HEADERS = 28
"""Of IP and UDP."""
SOON_S = 60.0
ECHO = """
import socket
with socket.socket(type=socket.SOCK_DGRAM) as one:
    one.bind(("0.0.0.0", 9000))
    while True:
        one.sendto(*one.recvfrom(9000))
"""
ASK = """
import socket, sys
address, number, length, patience_s = sys.argv[1], *map(int, sys.argv[2:])
with socket.socket(type=socket.SOCK_DGRAM) as one:
    one.settimeout(patience_s)
    one.connect((address, 9000))
    try:
        for _ in range(number):
            one.send(bytes(length))
        print(sum(len(one.recv(9000)) for _ in range(number)))
    except OSError:
        print("nobody")
"""


@pytest.fixture
def ends(node_possible: None, tmp_path: Path) -> Iterator[tuple[End, End]]:
    first, second = (End(sandbox=Sandbox(tmp_path / address, name="end"), address=address) for address in (HERE, THERE))
    second.sandbox.start("echo", [sys.executable, "-c", ECHO])
    yield first, second
    for end in (first, second):
        end.sandbox.close()


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[str]:
    """Ends the link's process however a test ends."""
    name = secrets.token_hex(8)
    process = reaper.start(name, tmp_path / "nothing")
    yield name
    reaper.finish(process)


@pytest.fixture
def link(ends: tuple[End, End], mark: str, tmp_path: Path) -> Iterator[LaidLink]:
    made = LaidLink(*ends, Shape(delay_s=0.02), folder=tmp_path, mark=mark)
    wait_until(lambda: ask(ends) == "100", what="an echo over the link", deadline_s=SOON_S)
    yield made
    made.close()


def ask(ends: tuple[End, End], *, number: int = 1, length: int = 100, patience_s: int = 1) -> str:
    words = (THERE, str(number), str(length), str(patience_s))
    return ends[0].sandbox.run(sys.executable, "-c", ASK, *words).stdout.strip()


def test_what_passes_is_late_and_counted(link: LaidLink, ends: tuple[End, End]) -> None:
    before, begun = link.shape(), time.monotonic()
    assert ask(ends, number=10, length=1000, patience_s=60) == "10000"
    assert time.monotonic() - begun > 2 * 0.02
    after = link.shape()
    for counted, earlier in ((after.there, before.there), (after.back, before.back)):
        assert (counted.packets - earlier.packets, counted.bytes - earlier.bytes) == (10, 10 * (1000 + HEADERS))
    assert (after.there.lost, after.back.lost) == (0, 0)


def test_nothing_passes_a_cut_until_it_heals(link: LaidLink, ends: tuple[End, End]) -> None:
    before = link.cut()
    assert ask(ends) == "nobody"
    after = link.heal()
    assert (after.there.bytes, after.there.lost) == (before.there.bytes, 1)
    assert ask(ends, patience_s=60) == "100"


def test_a_slow_line_takes_its_time_and_heals_too(link: LaidLink, ends: tuple[End, End]) -> None:
    link.slow(rate_bps=(1000 + HEADERS) * 8 * 20)
    begun = time.monotonic()
    assert ask(ends, number=3, length=1000, patience_s=60) == "3000"
    assert time.monotonic() - begun > 3 / 20
    assert link.heal().shape == Shape(delay_s=0.02)


def test_a_lossy_line_loses_and_says_how_much(link: LaidLink, ends: tuple[End, End]) -> None:
    link.lossy(1.0)
    assert ask(ends, number=5) == "nobody"
    assert link.heal().there.lost == 5


def test_a_wrong_request_changes_nothing(link: LaidLink) -> None:
    before = link.shape()
    with pytest.raises(Exception, match="the link refused"):
        link.shape(colour="red")
    assert link.shape() == before


def test_no_end_of_it_is_left_and_it_can_be_laid_again(link: LaidLink, ends: tuple[End, End], mark: str) -> None:
    link.close()
    for end in ends:
        assert end.sandbox.run("ip", "link", "show", DEVICE, check=False).returncode
    with contextlib.closing(LaidLink(*ends, folder=link.path.parent, mark=mark)) as again:
        assert ask(ends, patience_s=60) == "100"
        assert again.shape().there.packets == 1
