"""Tries a door with inputs that nobody means well with: generated, edited from honest ones, and kept from earlier findings.

A door takes bytes and says in a word how it took them. It has given way where it raises, waits for ever, takes more CPU than it may, or
makes the process hold more memory than it may. An input that a door took in a new way is edited further: so a search goes deeper than its seeds.
Owns: the search, the bounds of one input, the corpus. Does not own: doors (`doors/`, one file each).
"""

import gzip
import hashlib
import logging
import resource
import signal
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fuzz.inputs import VALUES, Material, edited

CORPUS = Path(__file__).parent / "corpus"
_ROUND = 200
"""Examples of one search; the next one starts from what this one has found."""
_MOST_FOUND = 400
_PACKED_BYTES = 4096
"""Longer inputs are kept compressed: they repeat themselves."""
_ADDRESS_SPACE_BYTES = 2 << 30
"""More than this above what the process has is refused to it, so that a missing bound costs an exception and not the machine."""
_STUCK_S = 600.0
"""A door that uses its CPU is stopped earlier; this is for one that waits. A process that gets a hundredth of a core is not stuck."""

Enter = Callable[[bytes], str]


@dataclass(frozen=True, kw_only=True)
class Door:
    """One way in. `doors/__init__.py` lists them."""

    name: str
    opened: Callable[[], AbstractContextManager[Enter]]
    """Gives what takes one input. It returns how the input was taken, in few different words; it raises if the door gave way."""
    honest: Sequence[bytes]
    """What peers that mean well send."""
    words: Sequence[bytes] = ()
    """Of the door's language: keywords, field names, separators."""
    values: st.SearchStrategy[bytes] = VALUES
    """What takes the place of a value in a line of JSON."""
    most_input: int = 1 << 20
    most_held: int
    """Bytes that one input may make the process allocate at once."""
    most_cpu_s: float = 5.0
    """CPU time, so that a busy machine does not count."""
    plant: Callable[[pytest.MonkeyPatch], None]
    """Takes one of the door's bounds away: the search must see it."""


class GaveWayError(Exception):
    """A door has given way. `data`: to what."""

    def __init__(self, door: Door, data: bytes, why: str) -> None:
        super().__init__(f"{door.name}, {len(data)} bytes {data[:80]!r}: {why}")
        self.data = data


def try_one(door: Door, enter: Enter, data: bytes) -> str:
    """Put one input in; how it was taken.

    Raises:
        GaveWayError: the door did not hold.
    """
    tracemalloc.start()  # here alone: it makes the search itself slow
    try:
        with _bounded(door.most_cpu_s):
            outcome = enter(data)
        held = tracemalloc.get_traced_memory()[1]
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise GaveWayError(door, data, f"{type(error).__name__}: {str(error)[:300]}") from error
    finally:
        tracemalloc.stop()
    if held > door.most_held:
        raise GaveWayError(door, data, f"{held} bytes were held, {door.most_held} may be")
    return outcome[:200]


def search(
    door: Door, *, seeds: Sequence[bytes], budget_s: float, seed: int, shorten: bool = True, keep_new: bool = False
) -> GaveWayError | None:
    """Try inputs until one is found that the door does not hold, or the time is over.

    `budget_s` is of this process's CPU: a busy machine makes a search longer, not shorter.
    `seeds` must be held. `shorten`: what is found, within the same budget. `keep_new`: put what the door took in a new way into the corpus.
    """
    until_s = time.process_time() + budget_s
    with _unlogged(), door.opened() as enter:
        seen: dict[str, bytes] = {}
        for data in seeds:
            seen.setdefault(try_one(door, enter, data), data)
        while time.process_time() < until_s:
            seed += 1
            found = _search(door, enter, seeds=seeds, seen=seen, seed=seed, until_s=until_s, shorten=shorten)
            if found is not None:
                return found
        for data in set(seen.values()) - set(seeds) if keep_new else ():
            keep(door, data)
    return None


@contextmanager
def _unlogged() -> Iterator[None]:
    """A test keeps every record that is logged, with the error in it and the input that the error holds: gigabytes in minutes."""
    logging.disable()
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _search(
    door: Door,
    enter: Enter,
    *,
    seeds: Sequence[bytes],
    seen: dict[str, bytes],
    seed: int,
    until_s: float,
    shorten: bool,
) -> GaveWayError | None:
    failed: list[GaveWayError] = []
    newest = [*seen.values()][-_MOST_FOUND:]
    material = Material(honest=seeds, found=newest, words=door.words, values=door.values, most_bytes=door.most_input)

    @hypothesis.seed(seed)
    @settings(
        max_examples=_ROUND,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink) if shorten else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(edited(material))
    def probe(data: bytes) -> None:
        if time.process_time() > until_s:
            return  # the rest of a round, and the shortening of a finding, are given up
        try:
            seen.setdefault(try_one(door, enter, data), data)
        except GaveWayError as error:
            failed.append(error)
            raise

    try:
        probe()
    except (GaveWayError, hypothesis.errors.HypothesisException, ExceptionGroup):
        assert failed, "the search itself has failed"
    return min(failed, key=lambda error: len(error.data), default=None)


@contextmanager
def _bounded(cpu_s: float) -> Iterator[None]:
    spent: list[str] = []

    def stop(*_: object) -> None:
        spent.append(f"more than {cpu_s:g} s of CPU, or no end")
        raise TimeoutError(spent[0])

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    handler = signal.signal(signal.SIGPROF, stop)
    stuck = threading.Timer(_STUCK_S, signal.pthread_kill, (threading.get_ident(), signal.SIGPROF))
    stuck.start()
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _ADDRESS_SPACE_BYTES, hard))
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        stuck.cancel()
        stuck.join()
        signal.signal(signal.SIGPROF, handler)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    if spent:  # where somebody has caught it
        raise TimeoutError(spent[0])


def kept(door: Door) -> list[bytes]:
    """The inputs that are kept of a door: findings that were mended, and ways of being taken."""
    return [
        gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        for path in sorted((CORPUS / door.name).glob("*"))
    ]


def keep(door: Door, data: bytes) -> Path:
    """Put an input into the corpus; where it is."""
    name = hashlib.sha256(data).hexdigest()[:12]
    is_long = len(data) > _PACKED_BYTES
    path = CORPUS / door.name / (f"{name}.gz" if is_long else name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data, mtime=0) if is_long else data)
    return path
