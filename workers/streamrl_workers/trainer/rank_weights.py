"""What a rank above 0 publishes, and how rank 0 asks for it.

    RANK n   copies of its slices ─▶ PART (a thread: hashes, deltas, the folder) ─▶ STORE ◀══ server of weights ◀══ GENERATORS
                                                                                     ▲
    RANK 0   publishing: versions/<attempt>-<step>- ═════════════════════════════════╝

Owns: the store and the server of such a rank, and asking all of them. Does not own: which rows are whose (`engines/slices.py`), joining and
announcing (`step_loop.py`).

Invariants:
- One part is on its way at a time; the version that it belongs to is not announced before all parts are there.
- Who asks for a part that is on its way waits. A part that fails ends its rank, whose exit says why.
"""

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from streamrl.errors import UserError
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.process.daemon_thread import begin_in_thread
from streamrl_workers.stream.channel import Backoff
from streamrl_workers.stream.object_store import StoreUnavailableError
from streamrl_workers.stream.tls import Tls
from streamrl_workers.trainer.engines.engine import Kept, RetryError
from streamrl_workers.trainer.engines.process_group import ProcessGroup
from streamrl_workers.trainer.settings import TrainerSettings
from streamrl_workers.weights.deltas import DeltaStore
from streamrl_workers.weights.hashing import SliceBytes
from streamrl_workers.weights.http_client import HttpSource
from streamrl_workers.weights.http_server import HttpWeightServer
from streamrl_workers.weights.source import NotYetError, SourceBrokenError, SourceRefusedError
from streamrl_workers.weights.store import WeightStore
from streamrl_workers.weights.transports import TRANSPORTS

_WAIT_S = 3.0
"""For a part that is on its way; then whoever asks is told so, and asks again."""
_CHECK_S = 0.25
"""Between two checks whether the session has ended."""


def ending_of(error: Exception) -> UserError | RetryError:
    """Return what a rank ends with whose weights were not published: the user's error, or a reason to start it again."""
    if isinstance(error, UserError | RetryError):
        return error
    return RetryError(f"weights: {error if isinstance(error, StoreUnavailableError) else repr(error)}")


class RankWeights:
    """Keeps and serves the slices of one rank above 0."""

    def __init__(self, settings: TrainerSettings, *, failed: Callable[[UserError | RetryError], None]) -> None:
        """Listen. `failed`: called from a thread with what ends this rank. Raises UserError: the port is in use."""
        spec, variables = settings.spec.weights, settings.variables
        self.deltas = DeltaStore() if spec.has_deltas else None
        self._store = WeightStore(newest_kept=settings.memory_parts, deltas=self.deltas)
        self._parts = PartStore(self._store)
        self._failed = failed
        self._is_offered = settings.is_offered
        self.server = HttpWeightServer(
            self._parts,
            token=settings.token,
            tls=variables.tls,
            host=variables.bind_host,
            port=settings.weights_port,
        )
        self._bring = TRANSPORTS[spec.key].bring_part(self._store, settings.server_setup)
        host, _, port = self.server.address.rpartition(":")
        own = settings.pod_ip
        self.address = f"{(f'[{own}]' if ':' in own else own) or host}:{port}"
        """host:port at which generators and rank 0 reach it."""

    def retain(self, kept: Sequence[Kept]) -> None:
        """Drop the versions that rank 0 has dropped, except those that are being pulled."""
        self._store.retain(lambda version: (version.attempt, version.step) in kept)

    def publish(self, *, attempt: int, step: int, slices: Iterable[SliceBytes]) -> None:
        """Begin to make the part of a version."""
        self._parts.coming = (attempt, step)

        def publish() -> None:
            try:
                name = self._store.publish_part(attempt=attempt, step=step, slices=slices)
                if self._is_offered(step):
                    self._bring(name)
            except Exception as error:  # noqa: BLE001 - it ends the rank
                self._failed(ending_of(error))
            else:
                self._parts.arrived()

        begin_in_thread(publish, name="trainer-part")

    def close(self) -> None:
        """End the server."""
        self.server.close()


class PartStore:
    """A `WeightStore` of parts; one that is on its way is waited for."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self._changed = threading.Condition()
        self.coming: Kept | None = None

    def arrived(self) -> None:
        """Give the part that was on its way."""
        with self._changed:
            self.coming = None
            self._changed.notify_all()

    def versions(self) -> list[pb.VersionName]:
        """Return the names of the kept parts."""
        return self._store.versions()

    def content(self, content_hash: bytes) -> memoryview | None:
        """Return the bytes of a hash, if they are kept."""
        return self._store.content(content_hash)

    @contextmanager
    def pulling(self, version: pb.VersionName) -> Iterator[pb.Manifest | None]:
        """Give the manifest of a part, which is kept while inside; None: it is not kept. Raises NotYetError."""
        asked = (version.attempt, version.step)
        with self._changed:
            if not self._changed.wait_for(lambda: self.coming != asked, _WAIT_S):
                raise NotYetError(0)
        with self._store.pulling(version) as manifest:
            yield manifest


class RankParts:
    """The servers of all ranks above 0, as rank 0 asks them."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        timeout_s: float,
        token: str,
        tls: Tls | None,
        loss: Callable[[], RetryError | None] = lambda: None,
    ) -> None:
        """Ask nothing yet.

        Args:
            addresses: host:port of each rank, in their order.
            timeout_s: for all parts of a version, from when they are asked for.
            token: of the run.
            tls: in place of the token.
            loss: returns why a rank is lost, which ends a wait.
        """
        self._addresses = addresses
        self._loss = loss
        self._timeout_s = timeout_s
        self._token = token
        self._tls = tls

    def ask(
        self, *, attempt: int, step: int, ending: Callable[[], Exception | None] = lambda: None
    ) -> Mapping[str, pb.Manifest]:
        """Return what each of the ranks holds of a version, by its address.

        Raises:
            RetryError: one is lost, has not answered in time, or refuses.
            Exception: what `ending` returned in the meantime.
        """
        if not self._addresses:
            return {}
        return asyncio.run(self._ask(pb.VersionName(attempt=attempt, step=step), ending=ending))

    async def _ask(
        self, version: pb.VersionName, *, ending: Callable[[], Exception | None]
    ) -> Mapping[str, pb.Manifest]:
        asking = {
            address: asyncio.create_task(self._part(version, rank=rank, address=address), name=f"part-{rank}")
            for rank, address in enumerate(self._addresses, start=1)
        }
        left = set(asking.values())
        try:
            while left:
                if (end := ending() or self._loss()) is not None:
                    raise end
                done, left = await asyncio.wait(left, timeout=_CHECK_S, return_when=asyncio.FIRST_EXCEPTION)
                for task in done:
                    task.result()
        finally:
            for task in left:
                task.cancel()
            if left:
                await asyncio.wait(left)
        return {address: task.result() for address, task in asking.items()}

    async def _part(self, version: pb.VersionName, *, rank: int, address: str) -> pb.Manifest:
        what, backoff = f"part of version ({version.attempt}, {version.step}) at {address}", Backoff()
        reason = "it was not reached"
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    try:
                        return await self._asked_once(version, address=address)
                    except NotYetError:
                        reason = "it is still making it"
                    except SourceBrokenError as error:
                        reason = str(error)
                        await backoff.pause()
        except TimeoutError:
            raise RetryError(f"rank {rank} gave no {what} within {self._timeout_s:g} s: {reason}") from None
        except SourceRefusedError as error:
            raise RetryError(f"rank {rank} refuses its {what}: {error}") from None

    async def _asked_once(self, version: pb.VersionName, *, address: str) -> pb.Manifest:
        source = await HttpSource.connect(address, tls=self._tls, token=self._token, role="trainer")
        try:
            return await source.manifest(version)
        finally:
            await source.close()


NO_PARTS = RankParts((), timeout_s=0, token="", tls=None)
"""Of a trainer of one rank."""


def rank_parts(settings: TrainerSettings, *, ranks: ProcessGroup) -> RankParts:
    """Return the servers of the other ranks; a folder takes the time that the job gives it."""
    folder = settings.spec.weights.folder
    timeout_s = settings.spec.trainer.rank_timeout_seconds + (0 if folder is None else folder.timeout_seconds)
    return RankParts(
        ranks.addresses,
        timeout_s=timeout_s,
        token=settings.token,
        tls=settings.variables.tls,
        loss=lambda: ranks.loss,
    )
