"""The digest by which a checkpoint names the groups that a step consumed.

Written by trainers into a checkpoint's `meta.json`, compared with the journal by
`streamrl journal check`: the two sides agree on the history without storing it twice.
"""

from collections.abc import Iterable
from hashlib import blake2b

from streamrl_workers.stream.packing import pack_int64

_DIGEST_BYTES = 16


def composition_digest(group_ids: Iterable[int]) -> str:
    """Hex digest of a step's groups, whatever their order."""
    return blake2b(pack_int64(sorted(group_ids)), digest_size=_DIGEST_BYTES).hexdigest()
