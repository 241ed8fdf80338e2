"""Checkpoints on disk, `checkpoints/step-<8 digits>/`, and the trained model in the end: whole or not there at all.

With an object store each of them is copied there before anybody is told of it. What is newer there than on the disk is fetched at the start.

Owns: atomicity, the order journal-then-rename, `meta.json`, which checkpoints are kept, which one is good. Does not
own: the engine's files, the journal (`sync` is a callback).

Invariants:
- A directory with a checkpoint's name is complete: it was written under another name, synced to disk, and renamed.
- It is renamed only after `sync`: every step it holds is durable in the journal (design invariant 1).
- What is told of is in the object store too, so the journal keeps whatever the copies do not cover.
- `meta.json` names size and hash of every file, and its own digest, so damage is found before anything is loaded. A hash
  names its algorithm, so a checkpoint stays readable when a release takes another one.
"""

import contextlib
import hashlib
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from streamrl.errors import UserError
from streamrl.files import sync
from streamrl_workers.stream.digests import EMPTY_CHAIN, History, read_count, read_sealed, seal
from streamrl_workers.stream.object_store import DamagedObjectError, ObjectFolder, StoreUnavailableError
from streamrl_workers.trainer.engines.engine import FileHash, FileHashes, RetryError, TrainEngine
from streamrl_workers.weights.hashing import HASH_ALGORITHM, new_digest

_META_FILE = "meta.json"
_PARTIAL_PREFIX = ".partial-"
_MODEL_COMMIT = "config.json"
_NAME = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"\.partial-(?:(?:replaced-)?step-\d{8,}|adopted)")
"""Names of what killed writers leave beside checkpoints."""
_DIGESTS: dict[str, Callable[[], Any]] = {HASH_ALGORITHM: new_digest, "": lambda: hashlib.blake2b(digest_size=16)}
"""By the name before the colon of a hash in `meta.json`; earlier releases wrote none."""

log = logging.getLogger(__name__)


class DamagedCheckpointError(ValueError):
    """A checkpoint that is not what was written; the text says what is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMeta:
    """What a checkpoint says of itself."""

    step: int  # version; the history is the steps before it
    attempt: int  # of the trainer that wrote it
    history: tuple[str, ...]  # hex digest of each step's groups (stream/digests.py), from step `folded_steps` on
    folded_steps: int = 0
    chain: str = EMPTY_CHAIN  # of the steps before
    complete: bool = True
    files: FileHashes = field(default_factory=dict)

    @classmethod
    def of(cls, history: History, *, attempt: int) -> "CheckpointMeta":
        """Of a trainer with this history."""
        return cls(
            step=len(history),
            attempt=attempt,
            history=history.digests,
            folded_steps=history.folded_steps,
            chain=history.chain,
        )

    @property
    def past(self) -> History:
        """The steps that the checkpoint holds."""
        return History(digests=self.history, folded_steps=self.folded_steps, chain=self.chain)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A good checkpoint."""

    directory: Path
    meta: CheckpointMeta

    @property
    def written_s(self) -> float:
        """When it was written to this disk, since 1970."""
        return (self.directory / _META_FILE).stat().st_mtime


Save = Callable[[Path], "Future[FileHashes] | None"]
"""As `TrainEngine.save`; None: the directory is filled already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedCheckpoint:
    """A checkpoint under way."""

    meta: CheckpointMeta
    partial: Path  # its directory as long as it is not complete
    saving: "Future[FileHashes] | None"  # as of `Save`


class CheckpointStore:
    """The checkpoints of one run; this process is the only writer."""

    def __init__(self, root: Path, *, keep_last: int, copies: ObjectFolder | None = None) -> None:
        self._root = root
        self._keep_last = keep_last
        self._copies = copies

    def write(self, meta: CheckpointMeta, *, save: Save, sync: Callable[[], None]) -> Path:
        """Write a checkpoint: begin it, and complete it."""
        return self.complete(self.begin(meta, save=save), sync=sync)

    def begin(self, meta: CheckpointMeta, *, save: Save) -> "StartedCheckpoint":
        """Let `save` begin to fill a directory. Raises UserError: the disk does not take it."""
        try:
            partial = _emptied(self._root / f"{_PARTIAL_PREFIX}{_name(meta.step)}")
            return StartedCheckpoint(meta=meta, partial=partial, saving=save(partial))
        except OSError as error:
            raise _unwritable(self._root, error) from error

    def complete(self, started: "StartedCheckpoint", *, sync: Callable[[], None]) -> Path:
        """Wait until it is filled, then make it a checkpoint; `sync` returns when the journal holds its steps. One at a time, in any thread.

        Raises:
            UserError: disk or object store do not take it; the checkpoints before it are untouched.
            RetryError: the object store did not take it this time.
        """
        try:
            self._seal(started)
            sync()
            target = self._publish(started.partial, step=started.meta.step)
            if self._copies is not None:
                with _retried():
                    self._copy(target, copies=self._copies)
        except OSError as error:
            raise _unwritable(self._root, error) from error
        return target

    def path_of(self, step: int) -> Path:
        """Where the checkpoint of `step` is, or will be."""
        return self._root / _name(step)

    def oldest_step(self) -> int:
        """Step of the oldest checkpoint kept; 0 if there is none."""
        return min((_step(directory) for directory in self._directories()), default=0)

    def newest(self) -> Checkpoint | None:
        """The newest good checkpoint; damaged ones are named in the log and passed over. None: there is none yet.

        Raises:
            UserError: there are checkpoints, but all are damaged; or the object store cannot be used, or the disk does not take a copy.
            RetryError: the object store did not answer this time.
        """
        damage: list[str] = []
        found = self._newest_on_disk(damage)
        if self._copies is not None:
            try:
                with _retried():
                    found = self._fetch(self._copies, known=found, damage=damage)
            except OSError as error:
                raise _unwritable(self._root, error) from error
        if found is None and damage:
            raise UserError(
                field=str(self._root),
                rule=f"holds no good checkpoint ({'; '.join(damage)})",
                fix="restore one from a copy, or start a new run",
            )
        return found

    def _newest_on_disk(self, damage: list[str]) -> Checkpoint | None:
        """`damage`: gets a line for each that is passed over."""
        for directory in self._directories():
            try:
                return Checkpoint(directory=directory, meta=_read(directory))
            except DamagedCheckpointError as error:
                damage.append(f"{directory.name}: {error}")
                log.warning("checkpoint %s is damaged (%s); trying the one before", directory, error)
        return None

    def clean(self) -> None:
        """Remove what a killed writer left. Raises `UserError`: the disk does not let it."""
        try:
            for leftover in self._root.iterdir() if self._root.is_dir() else ():
                if _LEFTOVER.fullmatch(leftover.name):
                    _remove(leftover)
        except OSError as error:
            raise _unwritable(self._root, error) from error

    def _seal(self, started: "StartedCheckpoint") -> None:
        """Hash what was not hashed as it was written, and write the meta file."""
        hashed: FileHashes = {} if started.saving is None else started.saving.result()
        partial = started.partial
        names = [str(path.relative_to(partial)) for path in _files(partial)]
        files = {name: hashed[name] if name in hashed else _fingerprint(partial / name) for name in names}
        (partial / _META_FILE).write_text(seal(asdict(started.meta) | {"files": files}), encoding="utf-8")
        sync_tree(partial)

    def _publish(self, partial: Path, *, step: int) -> Path:
        target = self.path_of(step)
        if target.exists():  # damaged, or of an attempt whose steps were rolled back
            old = self._root / f"{_PARTIAL_PREFIX}replaced-{target.name}"
            target.rename(old)
            partial.rename(target)
            _remove(old)
        else:
            partial.rename(target)
        sync(self._root)
        self._prune(newest_step=step)
        return target

    def _prune(self, *, newest_step: int) -> None:
        """Keep the last few up to `newest_step`; a later one is of steps that were rolled back."""
        directories = self._directories()
        kept = [d for d in directories if _step(d) <= newest_step][: self._keep_last]
        for directory in directories:
            if directory not in kept:
                _remove(directory)

    def _copy(self, target: Path, *, copies: ObjectFolder) -> None:
        """Copy a checkpoint, then delete the copies of those that are no longer kept."""
        copies.child(target.name).upload(target, commit=_META_FILE)
        kept = {directory.name for directory in self._directories()}
        for name in _names(copies.folders()):
            if name not in kept:
                copies.child(name).remove(commit=_META_FILE)

    def _fetch(self, copies: ObjectFolder, *, known: Checkpoint | None, damage: list[str]) -> Checkpoint | None:
        """The newest good copy, if it is newer than what is `known` here; else what is known, copied if an earlier process had no time to.

        `damage`: as of `_newest_on_disk`.
        """
        copies.probe()
        for name in reversed(_names(copies.folders())):
            target, copy = self._root / name, copies.child(name)
            if known is not None and _step(target) <= known.meta.step:
                break
            if not copy.holds(_META_FILE):
                continue  # its writer was killed
            partial = _emptied(self._root / f"{_PARTIAL_PREFIX}{name}")
            try:
                copy.download(partial)
                meta = _read(partial, step=_step(target))
            except (DamagedCheckpointError, DamagedObjectError) as error:
                damage.append(f"copy {name}: {error}")
                log.warning("the copy %s is damaged (%s); trying the one before", copy.url, error)
                continue
            sync_tree(partial)
            _remove(target)
            partial.rename(target)
            sync(self._root)
            log.info("fetched %s", copy.url)
            return Checkpoint(directory=target, meta=meta)
        if known is not None:
            size_bytes = (known.directory / _META_FILE).stat().st_size
            if copies.child(known.directory.name).size(_META_FILE) != size_bytes:
                self._copy(known.directory, copies=copies)
        return known

    def _directories(self) -> list[Path]:
        """Newest first."""
        if not self._root.is_dir():
            return []
        return [self._root / name for name in reversed(_names(d.name for d in self._root.iterdir()))]


def sync_tree(directory: Path) -> None:
    """Bring a directory and all in it to the disk."""
    for path in (*_files(directory), *(p for p in directory.rglob("*") if p.is_dir()), directory):
        sync(path)


def export_once(engine: TrainEngine, *, directory: Path, copies: ObjectFolder | None) -> Path:
    """Export into `directory`, unless that was done before, and copy it; returns it.

    Raises:
        UserError: disk or object store do not take it.
        RetryError: the object store did not take it this time.
    """
    try:
        if not directory.exists():
            partial = _emptied(directory.with_name(f"{_PARTIAL_PREFIX}{directory.name}"))
            engine.export(partial)
            sync_tree(partial)
            partial.rename(directory)
        if copies is not None:
            with _retried():
                copies.child(directory.name).upload(directory, commit=_commit_of_model(directory))
    except OSError as error:
        raise _unwritable(directory, error, what="the model") from error
    return directory


def _commit_of_model(directory: Path) -> str:
    """Nothing loads a model without its config; what a simulated engine leaves is one file."""
    names = [path.name for path in _files(directory)]
    return _MODEL_COMMIT if _MODEL_COMMIT in names else names[0]


def discard_export(directory: Path, *, copies: ObjectFolder | None = None) -> None:
    """Of a run that goes on: what was exported is no longer its result, nor is its copy, also where the disk has lost the original.

    Raises:
        UserError: disk or object store do not take it.
        RetryError: the object store did not take it this time.
    """
    if copies is not None:
        with _retried():
            copies.child(directory.name).remove(commit=_MODEL_COMMIT)
    try:
        _remove(directory)
    except OSError as error:
        raise _unwritable(directory, error, what="the model") from error


def _emptied(directory: Path) -> Path:
    """A new directory, without what a killed writer left there."""
    _remove(directory)
    directory.mkdir(parents=True)
    return directory


def _remove(path: Path) -> None:
    """Remove a directory, or a link or a file at its name; what a link leads to stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _retried() -> Iterator[None]:
    """An object store that fails for now ends this process; its successor goes on from the disk."""
    try:
        yield
    except StoreUnavailableError as error:
        raise RetryError(f"checkpoints: {error}") from error


def _read(directory: Path, *, step: int | None = None) -> CheckpointMeta:
    """`step`: that it must be of; None: the one in the directory's name."""
    meta = _read_meta(directory / _META_FILE)
    if meta.step != (_step(directory) if step is None else step) or len(meta.past) != meta.step or not meta.complete:
        raise DamagedCheckpointError(f"{_META_FILE} does not belong to it")
    for name, fingerprint in meta.files.items():
        if not (directory / name).is_file():
            raise DamagedCheckpointError(f"{name} is missing")
        algorithm = fingerprint["hash"].rpartition(":")[0]
        if algorithm not in _DIGESTS:
            raise DamagedCheckpointError(f"{name} is hashed by {algorithm}, this StreamRL knows {HASH_ALGORITHM}")
        if _fingerprint(directory / name, algorithm=algorithm) != fingerprint:
            raise DamagedCheckpointError(f"{name} is not what was written")
    return meta


def _read_meta(path: Path) -> CheckpointMeta:
    try:
        document = read_sealed(path)
        counts = {key: read_count(document, key) for key in ("step", "attempt")}
        files: FileHashes = {
            name: {"size_bytes": one["size_bytes"], "hash": str(one["hash"])} for name, one in document["files"].items()
        }
        return CheckpointMeta(**(document | counts | {"history": History.read(document).digests, "files": files}))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedCheckpointError(f"{_META_FILE} cannot be read: {error}") from error


def _fingerprint(path: Path, *, algorithm: str = HASH_ALGORITHM) -> FileHash:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, _DIGESTS[algorithm]).hexdigest()
    return {"size_bytes": path.stat().st_size, "hash": f"{algorithm}:{digest}" if algorithm else digest}


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in sorted(directory.rglob("*")) if path.is_file())


def _names(found: Iterable[str]) -> list[str]:
    """Those of checkpoints, oldest first."""
    return sorted((name for name in found if _NAME.fullmatch(name)), key=lambda name: _step(Path(name)))


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _step(directory: Path) -> int:
    return int(directory.name.removeprefix("step-"))


def _unwritable(path: Path, error: OSError, *, what: str = "a checkpoint") -> UserError:
    return UserError(
        field=str(path),
        rule=f"{what} cannot be written: {error.strerror or error}",
        fix="free the disk, then resume the run",
    )
