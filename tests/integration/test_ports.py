"""Ports that tests give to servers that start later."""

from pathlib import Path

from support.ports import free_port
from support.tree import ROOT, python

OTHERS = "import sys; sys.path.append(sys.argv[1])\nfrom support.ports import free_port\nfor _ in range(50): print(free_port())"

TESTS = ROOT / "tests"


def test_a_port_is_nobody_elses_until_its_server_starts() -> None:
    ours = [free_port() for _ in range(50)]
    others = [int(line) for line in python(OTHERS, str(TESTS)).split()]
    assert len({*ours, *others}) == 100
    lowest, highest = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not [port for port in ours + others if lowest <= port <= highest], "the kernel gives them to any connection"
