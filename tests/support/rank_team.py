"""Trainer ranks as processes: rank 0 at the test's command (`rank0.py`), the others as they are."""

import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import torch

from streamrl import keys
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.weights.hashing import TensorBytes, bytes_hash, check_manifest
from streamrl_workers.weights.http_server import content_path, versions_path
from support.ports import free_port
from support.trainer_groups import trainer_spec

DEADLINE_S = 240.0
"""For a start of two torch processes, or a step, on a busy machine."""
TESTS = Path(__file__).parents[1]


class RankTeam:
    """A trainer of `size` ranks; use as a context."""

    def __init__(self, folder: Path, *, size: int, model: Path, **job: Any) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)  # a team that restarts finds what the last one kept
        (folder / keys.FILE_JOB).write_text(json.dumps(_document(**job)))
        shared = {
            keys.ENV_RUN_DIR: str(folder),
            keys.ENV_TOKEN: "a token",
            keys.ENV_SCHEDULER_ADDRESS: "127.0.0.1:1",
            keys.ENV_MODEL_PATH: str(model),
            keys.ENV_THREADS: "1",
            keys.ENV_WORLD_SIZE: str(size),
            keys.ENV_MASTER_ADDR: "127.0.0.1",
            keys.ENV_MASTER_PORT: str(free_port()),
            "PYTHONPATH": str(TESTS),
        }
        self.ranks = [self._start(rank, shared) for rank in range(size)]

    def _start(self, rank: int, shared: Mapping[str, str]) -> subprocess.Popen[str]:
        module = "support.rank0" if rank == 0 else "streamrl_workers.trainer"
        environ = os.environ | shared | {keys.ENV_RANK: str(rank), keys.ENV_PROCESS: f"trainer-{rank}"}
        with (self.folder / f"{rank}.log").open("w") as log:
            return subprocess.Popen(
                [sys.executable, "-m", module],
                env=environ,
                stdin=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stdout=subprocess.PIPE if rank == 0 else log,
                stderr=log,
                text=True,
            )

    def tell(self, **command: Any) -> None:
        """One command to rank 0."""
        assert self.ranks[0].stdin is not None
        self.ranks[0].stdin.write(json.dumps(command) + "\n")
        self.ranks[0].stdin.flush()

    def answer(self) -> Any:
        """The next line of rank 0, which is about to come."""
        output = self.ranks[0].stdout
        assert output is not None
        ready, _, _ = select.select([output], [], [], DEADLINE_S)
        line = output.readline() if ready else ""
        assert line, f"rank 0 says nothing: {self.log(0)}"
        return json.loads(line)

    def ask(self, **command: Any) -> Any:
        """One command to rank 0, and its answer."""
        self.tell(**command)
        return self.answer()

    def steps(self, count: int, *, first: int = 0, groups: int = 3) -> list[dict[str, float]]:
        """Train; the metrics of each step."""
        return [self.ask(do="step", step=step, groups=groups) for step in range(first, first + count)]

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """The weights as they would be published."""
        folder = self.folder / name
        folder.mkdir()
        return tensors_in(folder, self.ask(do="tensors", folder=str(folder)))

    def publish(self, step: int) -> "PublishedVersion":
        """Publish the weights as version `step`."""
        told = self.ask(do="copy", step=step) | self.ask(do="publish", step=step)
        version = pb.VersionName.FromString(bytes.fromhex(told.pop("version")))
        return PublishedVersion(version=version, **told)

    def log(self, rank: int) -> str:
        """What a rank has written."""
        return (self.folder / f"{rank}.log").read_text()

    def wait(self, rank: int, *, timeout_s: float = DEADLINE_S) -> int:
        """Exit code of a rank."""
        return self.ranks[rank].wait(timeout_s)

    def leave(self) -> list[int]:
        """End in order; exit codes by rank."""
        assert self.ranks[0].stdin is not None
        self.ranks[0].stdin.close()
        return [self.wait(rank) for rank in range(len(self.ranks))]

    def __enter__(self) -> "RankTeam":
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self.ranks:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()


@dataclass(frozen=True, kw_only=True)
class PublishedVersion:
    """A version of a team, and where it is."""

    version: pb.VersionName
    address: str
    collectives: int
    own_bytes: int

    def manifest(self) -> pb.Manifest:
        """As rank 0 gives it."""
        found = pb.Manifest.FromString(self._get(self.address, versions_path(self.version)))
        check_manifest(found, version=self.version)
        return found

    def tensors(self, *, of_rank_0: bool) -> dict[str, TensorBytes]:
        """All tensors, slice by slice: each of the rank that holds it, or all of rank 0."""
        manifest, found = self.manifest(), {}
        for entry in manifest.tensors:
            data = b""
            for one in entry.slices:
                address = manifest.holders[one.holder - 1] if one.holder and not of_rank_0 else self.address
                data += self._get(address, content_path(one.hash))
                assert bytes_hash(memoryview(data[-one.size_bytes :] if one.size_bytes else b"")) == one.hash
            found[entry.name] = TensorBytes(entry.dtype, tuple(entry.shape), memoryview(data))
        return found

    def _get(self, address: str, path: str) -> bytes:
        request = Request(f"http://{address}{path}", headers={"Authorization": "Bearer a token"})
        with urlopen(request, timeout=DEADLINE_S) as answer:
            return bytes(answer.read())


def tensors_in(folder: Path, facts: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """What `write_tensors` of `rank0.py` wrote."""
    return {
        name: torch.frombuffer(bytearray((folder / name).read_bytes()), dtype=getattr(torch, dtype)).view(shape)
        for name, (dtype, shape) in facts.items()
    }


def _document(**job: Any) -> dict[str, Any]:
    spec = trainer_spec(**job).model_dump(mode="json", by_alias=True, exclude_none=True)
    return {"apiVersion": "streamrl.io/v1alpha1", "kind": "RLJob", "metadata": {"name": "ranks"}, "spec": spec}
