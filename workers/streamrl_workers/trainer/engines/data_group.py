"""The process group in which ranks exchange tensors: NCCL between GPUs, gloo between processors.

Owns: torch's rendezvous, the device of this rank. Does not own: who the ranks are (`team.py`), what they exchange.

Rank 0 opens torch's store on a free port and tells the others by their link, so the job's rendezvous port stays with the team.
"""

import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # as torch.distributed shows it, where mypy sees it
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from streamrl.errors import UserError
from streamrl.keys import ENV_LOCAL_RANK
from streamrl_workers.trainer.engines.place import Place

START_S = 600.0
"""For all ranks to load torch and the model: alive, as their beats say, and slow on a busy machine. A lost one ends it at once."""
_LOOK_S = 0.1
"""Between two looks whether all ranks are there."""
_NCCL_SPARE_S = 60.0
"""NCCL's own deadline kills the process without a word; ours comes first."""


def device_of(place: Place) -> torch.device:
    """The GPU of this rank, or the processor where there is no GPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if place.local_rank >= torch.cuda.device_count():
        raise UserError(
            field=ENV_LOCAL_RANK,
            rule=f"must be below the {torch.cuda.device_count()} GPUs of this machine",
            got=place.local_rank,
            fix="lower spec.trainer.processesPerNode",
        )
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    return device


def open_store(place: Place) -> tuple[TCPStore, int]:
    """Rank 0: the store, listening where the rendezvous does, and its port."""
    try:
        listener = socket.create_server((place.host, 0))
    except OSError:
        listener = socket.create_server(("", 0))  # the rendezvous is a service's name
    port: int = listener.getsockname()[1]
    store = TCPStore(
        place.host, port, place.size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def reach_store(place: Place, *, port: int) -> TCPStore:
    """Every other rank: the same store."""
    return TCPStore(place.host, port, place.size, is_master=False, timeout=timedelta(seconds=START_S))


def join_group(
    place: Place,
    *,
    store: TCPStore,
    timeout_s: float,
    device: torch.device,
    check: Callable[[], None] = lambda: None,
) -> DeviceMesh:
    """Come together; a collective. From then on ranks that do not answer each other for `timeout_s` raise RuntimeError.

    `check` raises if a rank will not come: called again and again while one is missing.
    """
    _meet(place, store=store, check=check)
    if place.host in {"127.0.0.1", "localhost", "::1"}:  # gloo else takes the address of the machine's name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    spare_s = _NCCL_SPARE_S if device.type == "cuda" else 0.0
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=timeout_s + spare_s),
        device_id=device if device.type == "cuda" else None,
    )
    return init_device_mesh(device.type, (place.size,))


def _meet(place: Place, *, store: TCPStore, check: Callable[[], None]) -> None:
    store.set(f"here/{place.rank}", "")
    everyone = [f"here/{rank}" for rank in range(place.size)]
    deadline_s = time.monotonic() + START_S
    while not store.check(everyone):
        check()
        if time.monotonic() > deadline_s:
            absent = [rank for rank, name in enumerate(everyone) if not store.check([name])]
            raise RuntimeError(f"ranks {absent} have not loaded torch within {START_S:g} s")
        time.sleep(_LOOK_S)
