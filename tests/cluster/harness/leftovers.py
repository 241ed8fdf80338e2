"""What a node could leave on this machine, as values to compare before and after, and the removal of what a killed one left.

The kernel takes processes, mounts, devices and rules with the namespaces. Cgroups and folders outlive them: they carry the
number of the harness's process in their names, and the next start removes those whose process is gone.
"""

import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

PREFIX = "streamrl-node-"
CGROUPS = Path("/sys/fs/cgroup")
GONE_S = 60.0
SUSPECT = re.compile(r"streamrl|containerd|kubelet|netns|/cni")
NAMED = re.compile(rf"{PREFIX}(\d+)-")


def own_name() -> str:
    """Name for the folder and the cgroup of a node that this process starts."""
    return f"{PREFIX}{os.getpid()}-{time.monotonic_ns() % 1_000_000}"


def cgroup_roots() -> list[Path]:
    """Every hierarchy: one with cgroup v2, one per controller with v1."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS]
    return [path for path in CGROUPS.iterdir() if path.is_dir() and not path.is_symlink()]


def make_cgroup(name: str) -> None:
    """Make the root of a node's cgroups: the kubelet wants it to be there."""
    for root in cgroup_roots():
        (root / name).mkdir(exist_ok=True)
        for setting in ("cpuset.cpus", "cpuset.mems"):  # v1: a cpuset without processors takes no process
            if (root / name / setting).exists() and (root / setting).exists():
                (root / name / setting).write_text((root / setting).read_text())


def remove_cgroup(name: str) -> None:
    """Remove a node's cgroups; the kernel needs a moment to let go of those of the killed."""
    end = time.monotonic() + GONE_S
    while left := [folder for root in cgroup_roots() for folder in _deepest_first(root / name)]:
        for folder in left:
            try:
                folder.rmdir()
            except OSError as error:
                if time.monotonic() > end:
                    raise TimeoutError(f"waited {GONE_S:.0f} s for the cgroup {folder} to be empty: {error}") from error
        time.sleep(0.02)


def _deepest_first(folder: Path) -> list[Path]:
    if not folder.exists():
        return []
    return [*sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True), folder]


def clean_stale() -> list[str]:
    """Remove what harnesses left whose processes are gone; returns the names."""
    places = [*cgroup_roots(), Path(tempfile.gettempdir())]
    names = {path.name for place in places for path in place.glob(f"{PREFIX}*")}
    stale = [name for name in sorted(names) if (found := NAMED.match(name)) and not _alive(int(found.group(1)))]
    for name in stale:
        remove_cgroup(name)
        shutil.rmtree(Path(tempfile.gettempdir()) / name, ignore_errors=True)
    return stale


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def machine_state() -> dict[str, list[str]]:
    """What belongs to the whole machine and no node may touch: equal before a node's start and after its end."""
    mounts = [line.split(" ")[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    settings = ("kernel/panic", "kernel/panic_on_oops", "vm/overcommit_memory", "net/ipv4/ip_forward")
    return {
        "mounts": sorted(path for path in mounts if SUSPECT.search(path)),
        "network namespaces": sorted(_output("ip", "netns", "list")),
        "rules": _output("nft", "list", "ruleset"),
        "settings": [Path("/proc/sys", name).read_text() for name in settings],
    }


def traces(mark: str, device: str, namespace: str) -> dict[str, list[str]]:
    """What one node has on this machine: something of each kind while it runs, nothing after it has ended."""
    return {
        "processes": sorted(path.parts[2] for path in Path("/proc").glob("[0-9]*/ns/pid") if _link(path) == namespace),
        "devices": [path.name for path in Path("/sys/class/net").iterdir() if path.name == device],
        "routes": [line for line in _output("ip", "-4", "route", "show", "table", "all") if f"dev {device}" in line],
        "cgroups": [str(root / mark) for root in cgroup_roots() if (root / mark).exists()],
        "folders": [path.name for path in Path(tempfile.gettempdir()).glob(mark)],
    }


def wait_gone(mark: str, device: str, namespace: str) -> dict[str, list[str]]:
    """Return what is left after the moment that the kernel needs to let go of a namespace; {} = nothing."""
    end = time.monotonic() + GONE_S
    while True:
        left = {kind: found for kind, found in traces(mark, device, namespace).items() if found}
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.1)


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:  # it ended while we looked
        return ""


def _output(*argv: str) -> list[str]:
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()
