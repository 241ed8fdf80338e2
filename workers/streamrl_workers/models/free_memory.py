"""What of a device's memory is free: for the trainer's check before the start, and for a bound on keys and values."""

from pathlib import Path

import torch

_MEMINFO = "proc/meminfo"
_CGROUP = "sys/fs/cgroup"


def free_bytes(device: torch.device, *, ranks: int = 1, root: Path = Path("/")) -> int:
    """Of the GPU; of main memory, which `ranks` processes share, what machine and container leave."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_machine_bytes(root), _container_bytes(root)) // ranks


def total_bytes(device: torch.device) -> int:
    """Return all memory of a GPU; 0 for a processor, or where no GPU can be asked."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 0
    return int(torch.cuda.get_device_properties(device).total_memory)


def _machine_bytes(root: Path) -> int:
    """Without /proc as much as there could ever be: nothing is refused there."""
    try:
        lines = dict(line.split(":", 1) for line in (root / _MEMINFO).read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):
        return 2**63


def _container_bytes(root: Path) -> int:
    """Its limit less what it uses; pages of files are given back under pressure."""
    group = root / _CGROUP
    try:
        limit, used = int((group / "memory.max").read_text()), int((group / "memory.current").read_text())
        files = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(files["inactive_file"]))
    except (OSError, ValueError, KeyError):  # no limit is the word "max"
        return 2**63
