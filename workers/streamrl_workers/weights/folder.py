"""Weights through a folder that a trainer writes and generators read: of an object store, or a mounted directory.

    URL/<run>/weights/content/<hash>                       the bytes of a tensor, or of a delta
    URL/<run>/weights/versions/<attempt>-<step>-<hash>     the Manifest of a version, written behind all that it names
    URL/<run>/weights/owner                                the identity of the run that writes there

Owns the layout, what is written and when it is deleted, and reading. Does not own bytes of versions (`store.py`), nor verifying them (`pull.py`).

Invariants:
- A version whose manifest is there is whole, whenever a trainer is killed. It is announced afterwards.
- Only a trainer writes and deletes; a manifest goes before what it names. Kept are the newest versions, and of older ones at most
  `_MOST_OLDER`, for as long as a pull may take. What an earlier life of the trainer left is used or deleted with the first version.
- Only names of the forms above are deleted, and only in a folder that this run owns: it is asked before each version.
- A read that was given up writes no more into a puller's memory. No thread here keeps a process from its end.
"""

import asyncio
import contextlib
import logging
import math
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from google.protobuf.message import DecodeError

from streamrl.errors import UserError
from streamrl.files import MissingFileError, read_text, replace_file
from streamrl.keys import FILE_WEIGHTS_OWNER
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.process.daemon_thread import begin_in_thread
from streamrl_workers.stream.channel import Backoff
from streamrl_workers.stream.object_store import ObjectFolder, StoreUnavailableError
from streamrl_workers.weights.disk_folder import PARTIAL, DiskFolder
from streamrl_workers.weights.hashing import at_one_place, contents, version_text
from streamrl_workers.weights.source import NotKeptError, Piece, ServedStore, SourceBrokenError, SourceRefusedError

FIELD = "spec.weights.folder.url"
_CONTENT, _VERSIONS, _OWNER = "content", "versions", "owner"
_OURS = re.compile(rf"(?:{_CONTENT}/[0-9a-f]{{64}}|{_VERSIONS}/\d+-\d+-[0-9a-f]{{64}})(?:{re.escape(PARTIAL)})?")
"""Names that are ours to delete."""
_IDENTITY_BYTES = 16
_STREAMS = 4
"""Contents that are written at once."""
_MOST_OLDER = 8
"""Versions beyond the newest, for slow pulls."""
_LOOK_S = 0.25
"""Between two looks whether this process is to end."""
_REQUEST_BYTES = 4 * 2**20
"""Read at once: long enough to hide a round trip, short enough that its copy holds up no event loop."""
_ANSWER_S = 60.0
"""For these bytes."""
_MANIFEST_BYTES = 2**28
_LEAST_SLASHES = 2
"""In an address: URL/<run>/weights."""
_MOST_CALLS = 16
"""Reads at once, those included that nobody waits for any more."""

_THREAD = "weights-folder"
_log = logging.getLogger("streamrl.weights")


@dataclass(slots=True)
class _Written:
    contents: set[str]  # names
    until_s: float = math.inf  # known once it is not among the newest


class FolderWeightServer:
    """Brings versions of a store into the folder; generators find them there."""

    def __init__(
        self,
        store: ServedStore,
        *,
        url: str,
        run: str,
        owner: Callable[[], bytes],
        newest_kept: int,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`run`: a name that no other run with this URL has; `owner`: returns the run's identity, asked with the first version. Nothing is asked of the store of objects.

        Raises:
            UserError: no library here reads such URLs.
        """
        self._store = store
        self._root = _folder_at(url)
        self._find_owner = owner
        self._owner = b""  # known with the first version
        self._folder = self._root.child(run).child("weights")
        self.address = self._folder.url
        self.served_bytes = 0
        """Written, since it began."""
        self._newest_kept = newest_kept
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._there: dict[str, int] | None = None  # bytes by name; None: it was not asked yet
        self._checked = set[str]()  # names that this process has written, or asked the store for: a list may be old
        self._kept: dict[str, _Written] = {}  # by name of the manifest, oldest first
        self._last = set[str]()  # contents of the last part

    def offer(self, version: pb.VersionName, *, ended: Callable[[], bool]) -> bool:
        """Write a version of the store; False: `ended` was true before it was there.

        Raises:
            StoreUnavailableError: it could not be written in time.
            UserError: it cannot be written.
        """
        until_s, backoff = self._clock() + self._timeout_s, Backoff()
        reason = "it hangs"
        while True:
            work = begin_in_thread(lambda: self._write(version), name=_THREAD)
            while not wait([work], _LOOK_S).done:
                if ended():
                    return False
                if self._clock() >= until_s:
                    raise self._late(reason)
            try:
                work.result()
            except StoreUnavailableError as error:
                reason = str(error)
            except OSError as error:
                rule = f"does not take weights: {error.strerror or error}"
                raise UserError(
                    field=FIELD, rule=rule, got=self._root.url, fix="free the disk, or its rights"
                ) from error
            else:
                return True
            if self._clock() >= until_s:
                raise self._late(reason)
            time.sleep(backoff.next_pause_s())

    def close(self) -> None:
        """Nothing: what is there stays for those who read it."""

    def _late(self, reason: str) -> StoreUnavailableError:
        return StoreUnavailableError(f"a version was not written within {self._timeout_s:g} s: {reason}")

    def _write(self, version: pb.VersionName) -> None:
        if self._there is None:
            self._root.probe()
            self._owner = self._find_owner()
            self._claim()
            self._there = {name: size for name, size in self._folder.sizes().items() if _OURS.fullmatch(name)}
        else:
            self._claim()
        with self._store.pulling(version) as manifest:
            assert manifest is not None, "it was published just now"
            own = _contents(manifest, is_own=True)
            self._write_all(own)
            by_others = _contents(manifest, is_own=False)  # before they gave their parts
            self._there |= by_others
            name = f"{_VERSIONS}/{version_text(version)}"
            self._put(name, memoryview(manifest.SerializeToString()))
        self._kept[name] = _Written({*own, *by_others})
        self._clean()

    def _claim(self) -> None:
        """Write whose folder it is, if that is not written yet. Raises UserError: it is another run's."""
        found = self._read_owner()
        if found is None or (found != self._owner and self._owner.startswith(found)):  # none, or half of ours
            self._folder.write(_OWNER, memoryview(self._owner))
            found = self._read_owner()  # another run that began in the same moment
        if found != self._owner:
            folder = self._folder.url
            raise UserError(
                field=FIELD,
                rule="must not be that of another run with the same folder name",
                got=self._root.url,
                fix=f"name another URL; if that run has ended, delete {folder}",
            )

    def _read_owner(self) -> bytes | None:
        return self._folder.read(_OWNER, begin=0, end=2 * len(self._owner))

    def _write_all(self, contents: Mapping[str, int]) -> None:
        unchecked = iter([(name, size) for name, size in contents.items() if name not in self._checked])
        streams = [begin_in_thread(lambda: self._write_contents(unchecked), name=_THREAD) for _ in range(_STREAMS)]
        wait(streams)
        for stream in streams:
            stream.result()

    def _write_contents(self, contents: Iterator[tuple[str, int]]) -> None:
        assert self._there is not None
        for name, size_bytes in contents:  # the streams share them
            if self._there.get(name) == size_bytes == self._folder.size(name):
                with self._lock:
                    self._checked.add(name)
                continue
            data = self._store.content(bytes.fromhex(name.removeprefix(f"{_CONTENT}/")))
            assert data is not None, "the version is being pulled"
            self._put(name, data)

    def _put(self, name: str, data: memoryview) -> None:
        self._folder.write(name, data)
        with self._lock:
            assert self._there is not None
            self._there[name] = len(data)
            self._checked.add(name)
            self.served_bytes += len(data)

    def _clean(self) -> None:
        """Delete what no kept version needs; what cannot be deleted now is deleted with the next version."""
        assert self._there is not None
        now_s, older = self._clock(), list(self._kept)[: -self._newest_kept]
        for place, name in enumerate(older, start=_MOST_OLDER - len(older)):
            kept = self._kept[name]
            kept.until_s = min(kept.until_s, now_s + self._timeout_s)
            if place < 0 or kept.until_s <= now_s:
                del self._kept[name]
        needed = {*self._kept}.union(*(kept.contents for kept in self._kept.values()))
        try:
            for folder in (_VERSIONS, _CONTENT):
                names = [name for name in self._there.keys() - needed if name.startswith(f"{folder}/")]
                self._folder.delete(names)
                for name in names:
                    del self._there[name]
                self._checked.difference_update(names)
        except (StoreUnavailableError, UserError, OSError) as error:
            _log.warning("old weights stay for now: %s", error)


class FolderPartWriter(FolderWeightServer):
    """Brings the slices of a rank above 0 into the folder: rank 0 claims it, writes manifests, and deletes."""

    def _write(self, version: pb.VersionName) -> None:
        with self._store.pulling(version) as manifest:
            assert manifest is not None, "it was published just now"
            own = _contents(manifest, is_own=True)
            # Rank 0 deletes what no kept version needs. So what this rank has written is there if its last part had it; else the folder is asked.
            self._checked &= self._last
            self._there = dict(own)
            self._write_all(own)
        self._last = {*own}


class FolderSource:
    """Reads from such a folder."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._given_up = asyncio.get_running_loop().create_future()

    @classmethod
    async def connect(cls, address: str, **_whose: object) -> "FolderSource":
        """`address`: URL of the weights. Who may read them is a matter of the folder."""
        if address.count("/") < _LEAST_SLASHES:
            raise SourceBrokenError(f"{address} is no folder of weights")
        return cls(address)

    async def manifest(self, version: pb.VersionName) -> pb.Manifest:
        body = await self._read(f"{_VERSIONS}/{version_text(version)}", begin=0, end=_MANIFEST_BYTES)
        try:
            return at_one_place(pb.Manifest.FromString(body))
        except DecodeError:
            raise SourceRefusedError(f"{len(body)} bytes that are no manifest") from None

    async def fetch(self, piece: Piece, *, arrived: Callable[[int], None]) -> None:
        while piece.begin < piece.end:
            end = min(piece.end, piece.begin + _REQUEST_BYTES)
            data = await self._read(_content(piece.hash), begin=piece.begin, end=end)
            if len(data) != end - piece.begin:
                raise SourceRefusedError(f"{piece.hash.hex()} ends at {piece.begin + len(data)} of its bytes")
            piece.buffer[piece.begin : end] = data
            piece.begin = end
            arrived(len(data))

    def abort(self) -> None:
        if not self._given_up.done():
            self._given_up.set_result(None)

    async def close(self) -> None:
        self.abort()

    async def _read(self, name: str, *, begin: int, end: int) -> bytes:
        if self._given_up.done():
            raise SourceBrokenError("it was given up")
        if not _calls.acquire(blocking=False):
            raise SourceBrokenError(f"{_MOST_CALLS} reads hang")
        work = begin_in_thread(lambda: _read(self._url, name, begin=begin, end=end), name=_THREAD)
        work.add_done_callback(lambda _: _calls.release())
        reading = asyncio.wrap_future(work)
        try:
            await asyncio.wait({reading, self._given_up}, timeout=_ANSWER_S, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                raise SourceBrokenError("it was given up" if self._given_up.done() else f"no answer in {_ANSWER_S:g} s")
            data = reading.result()
        except (StoreUnavailableError, OSError, RuntimeError) as error:  # of the last there was no thread
            raise SourceBrokenError(str(error)) from None
        except UserError as error:
            raise SourceRefusedError(str(error)) from None
        finally:
            reading.cancel()
        if data is None:
            raise NotKeptError(f"{name} is not there")
        return data


_calls = threading.BoundedSemaphore(_MOST_CALLS)


_Folder = DiskFolder | ObjectFolder


def _folder_at(url: str) -> _Folder:
    """The folder that a job names. Raises UserError: no library here reads such URLs."""
    return DiskFolder.at(url, field=FIELD) if url.startswith("/") else ObjectFolder.at(url, field=FIELD)


@lru_cache(maxsize=4)
def _opened(address: str) -> _Folder:
    """The weights of a run at their address. Streams share its connections."""
    url, run, weights = address.rsplit("/", 2)
    return _folder_at(url or "/").child(run).child(weights)


def _read(url: str, name: str, *, begin: int, end: int) -> bytes | None:
    data = _opened(url).read(name, begin=begin, end=end)
    if data is None and url.startswith("/") and not Path(url).is_dir():
        raise UserError(
            field=FIELD, rule="is not mounted here", got=url, fix="mount the trainer's directory at its path"
        )
    return data


def _contents(manifest: pb.Manifest, *, is_own: bool) -> dict[str, int]:
    """Return the names and sizes of the slices and deltas of the server's own, or of the other ranks."""
    found = contents(manifest)
    return {_content(name): size_bytes for name, size_bytes, holder in found if size_bytes and (not holder) == is_own}


def _content(content_hash: bytes) -> str:
    return f"{_CONTENT}/{content_hash.hex()}"


def run_identity(store: Path, *, copies: ObjectFolder | None) -> bytes:
    """Return the identity of the run that keeps its checkpoints in `store`; made at the first call and kept there.

    It is kept with the copies of the checkpoints as well: a run that goes on from those on another disk is the same run.

    Raises:
        UserError: the file that holds it cannot be read or written, or is damaged.
        StoreUnavailableError: the copies cannot be asked.
    """
    path, length = store / FILE_WEIGHTS_OWNER, 2 * _IDENTITY_BYTES
    copied = None if copies is None else copies.read(FILE_WEIGHTS_OWNER, begin=0, end=2 * length)
    kept = None
    with contextlib.suppress(MissingFileError):
        kept = read_text(path, most_bytes=length, beneath=store).encode()
    held = copied if kept is None else kept
    identity = secrets.token_hex(_IDENTITY_BYTES).encode() if held is None else held
    if not re.fullmatch(rb"[0-9a-f]{%d}" % length, identity):
        raise UserError(field=str(path), rule="is damaged: it must be 32 hex digits", fix="delete it and its copy")
    if kept is None:
        replace_file(path, identity)
    if copies is not None and copied != identity:
        copies.write(FILE_WEIGHTS_OWNER, memoryview(identity))
    return identity
