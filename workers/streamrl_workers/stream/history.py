"""The digests by which a checkpoint names the groups that its steps consumed.

Written by trainers into a checkpoint's `meta.json`, compared with the journal by
`streamrl journal check`: the two sides agree on the history without storing it twice.

A *chain* is one digest for all steps before some step: chain(0) = zeros,
chain(k + 1) = blake2b(chain(k) || digest(k)). Who has the chain at k and the digests from k on has as
good a proof as who has all digests, in constant size.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

from streamrl_workers.stream.packing import pack_int64

_DIGEST_BYTES = 16

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

    def __len__(self) -> int:
        return self.folded_steps + len(self.digests)

    def with_step(self, group_ids: Iterable[int]) -> "History":
        """One more step that consumed these groups."""
        digests = (*self.digests, composition_digest(group_ids))
        old, newest = digests[:-_DIGESTS_KEPT], digests[-_DIGESTS_KEPT:]
        return History(
            digests=newest,
            folded_steps=self.folded_steps + len(old),
            chain=extend_chain(self.chain, digests=old),
        )
