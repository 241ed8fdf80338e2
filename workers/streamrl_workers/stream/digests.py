"""Digests by which two processes agree: JSON that names its own digest, and the history of a run's steps.

Sealed JSON is an object with one more key, `digest`: blake2b over all the others, as JSON with sorted keys and no spaces.

The history says which groups a checkpoint's steps consumed. Trainers write it into `meta.json`; `streamrl journal check`
compares it with the journal. A *chain* is one digest for all steps before some step: chain(0) = zeros,
chain(k + 1) = blake2b(chain(k) || digest(k)). The chain at k and the digests from k on prove as much as all digests, in
constant size.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from streamrl.errors import shorten
from streamrl.files import MOST_JSON_BYTES, parse_json, read_text
from streamrl_workers.stream.packing import pack_int64

_KEY = "digest"
_DIGEST_BYTES = 16
_MOST_COUNTED = 2**53
"""More steps than any run has, and exact in every reader of JSON."""


def seal(document: Mapping[str, Any]) -> str:
    """The text of `document` and its digest."""
    return json.dumps({**document, _KEY: _digest(document)})


def read_sealed(path: Path, *, beneath: Path | None = None) -> dict[str, Any]:
    """The document in a regular file; `beneath` as of `open_regular`.

    Raises:
        ValueError: it cannot be read, or is not what `seal` wrote.
    """
    return unseal(read_text(path, most_bytes=MOST_JSON_BYTES, beneath=beneath))


def unseal(text: str) -> dict[str, Any]:
    """The document in `text`, without the digest.

    Raises:
        ValueError: it is not what `seal` wrote.
    """
    document = parse_json(text)
    if not isinstance(document, dict) or _KEY not in document:
        raise ValueError("it has no digest of itself")
    digest = document.pop(_KEY)
    try:
        is_intact = digest == _digest(document)
    except RecursionError:
        is_intact = False
    if not is_intact:
        raise ValueError("it is not what was written")
    return document


def _digest(document: Mapping[str, Any]) -> str:
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return blake2b(canonical.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def read_count(document: Mapping[str, Any], key: str) -> int:
    """A number of steps or attempts in a document; 0 where it has none. Raises ValueError: it is no such number."""
    value = document.get(key, 0)
    if type(value) is not int or not 0 <= value < _MOST_COUNTED:
        raise ValueError(f"its {key} is {shorten(value)}")
    return value


_DIGEST = re.compile(f"[0-9a-f]{{{2 * _DIGEST_BYTES}}}")
EMPTY_CHAIN = bytes(_DIGEST_BYTES).hex()
"""Chain of no steps."""
_DIGESTS_KEPT = 1000
"""Newest steps that a history names one by one (36 KB of `meta.json`), so that a difference can be told by its step."""


def composition_digest(group_ids: Iterable[int]) -> str:
    """Hex digest of a step's groups, whatever their order."""
    return blake2b(pack_int64(sorted(group_ids)), digest_size=_DIGEST_BYTES).hexdigest()


def extend_chain(chain: str, *, digests: Iterable[str]) -> str:
    """The chain after the steps with these digests. ValueError where one is not hex."""
    for digest in digests:
        chain = blake2b(bytes.fromhex(chain) + bytes.fromhex(digest), digest_size=_DIGEST_BYTES).hexdigest()
    return chain


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The steps that some weights have taken, in constant size: a chain of the old ones, digests of the newest."""

    digests: tuple[str, ...] = ()
    """Of the steps from `folded_steps` on."""
    folded_steps: int = 0
    chain: str = EMPTY_CHAIN
    """Of the steps before."""

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> "History":
        """The history in a document, which anybody may have written. Raises ValueError, KeyError: it holds none."""
        digests, chain = document["history"], document.get("chain", EMPTY_CHAIN)
        if not isinstance(digests, list):
            raise ValueError("its history is no list")  # noqa: TRY004 - of a document
        if wrong := [one for one in (*digests, chain) if not (isinstance(one, str) and _DIGEST.fullmatch(one))]:
            raise ValueError(f"its history has {shorten(wrong[0])} for a digest")
        return cls(digests=tuple(digests), folded_steps=read_count(document, "folded_steps"), chain=chain)

    def __len__(self) -> int:
        return self.folded_steps + len(self.digests)

    def chain_at(self, step: int) -> str:
        """Chain of the steps before this one, which is not among the folded ones."""
        return extend_chain(self.chain, digests=self.digests[: step - self.folded_steps])

    def with_step(self, group_ids: Iterable[int]) -> "History":
        """One more step that consumed these groups."""
        digests = (*self.digests, composition_digest(group_ids))
        old, newest = digests[:-_DIGESTS_KEPT], digests[-_DIGESTS_KEPT:]
        return History(
            digests=newest,
            folded_steps=self.folded_steps + len(old),
            chain=extend_chain(self.chain, digests=old),
        )
