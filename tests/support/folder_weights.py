"""A trainer's part of weights through a folder; as a program, one that can be killed at any write.

python -m support.folder_weights URL RUN      says "ready", waits for a line, publishes; says each version that can be had
"""

import asyncio
import sys

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.weights.address import Route
from streamrl_workers.weights.deltas import DeltaStore
from streamrl_workers.weights.folder import FolderSource, FolderWeightServer
from streamrl_workers.weights.hashing import TensorBytes
from streamrl_workers.weights.pull import Nearby, pull
from streamrl_workers.weights.store import WeightStore

STEPS = (1, 2, 3)
SIZES = {"base": 300_000, "adapter": 20_000, "empty": 0}
TIMEOUT_S = 240.0
OWNER = b"0" * 32


def tensors(step: int) -> dict[str, TensorBytes]:
    """The base never changes, of the adapter a few bytes do."""
    made = {name: bytearray(bytes(range(250)) * (size // 250)) for name, size in SIZES.items()}
    made["adapter"][:50] = bytes([step]) * 50
    return {name: TensorBytes("uint8", (len(data),), memoryview(bytes(data))) for name, data in made.items()}


class FolderTrainer:
    """Publishes versions; its clock stands still unless it is moved."""

    def __init__(
        self, url: str, *, run: str, attempt: int = 1, newest_kept: int = 1, deltas: bool = False, owner: bytes = OWNER
    ) -> None:
        self.now_s = 0.0
        self.attempt = attempt
        self.store = WeightStore(newest_kept=1, deltas=DeltaStore() if deltas else None)
        self.server = FolderWeightServer(
            self.store,
            url=url,
            run=run,
            owner=lambda: owner,
            newest_kept=newest_kept,
            timeout_s=TIMEOUT_S,
            clock=lambda: self.now_s,
        )

    def publish(self, step: int) -> pb.VersionName:
        """A version that can be had."""
        version = self.store.publish(attempt=self.attempt, step=step, tensors=tensors(step))
        assert self.server.offer(version, ended=lambda: False)
        return version


async def pulled(address: str, version: pb.VersionName, *, nearby: Nearby | None = None) -> list[int]:
    """Pull as a generator does, compare, and tell the bytes that were read."""
    arrived: list[int] = []
    found = await pull(
        Route(pb.WeightsAvailable(version=version, address=address)),
        timeout_s=TIMEOUT_S,
        connect=lambda target: FolderSource.connect(target.address),
        arrived=lambda _, size: arrived.append(size),
        nearby=nearby,
    )
    assert found == tensors(version.step)
    return arrived


def pulls(address: str, version: pb.VersionName) -> int:
    """The same without an event loop: bytes that were read."""
    return sum(asyncio.run(pulled(address, version)))


def main() -> None:
    """The program."""
    trainer = FolderTrainer(sys.argv[1], run=sys.argv[2])
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    for step in STEPS:
        version = trainer.publish(step)
        trainer.now_s += 2 * TIMEOUT_S
        sys.stdout.write(f"{version.attempt}-{step}-{version.hash.hex()}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
