"""Where this process stands among the trainer's ranks. Pure; no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One of `size` ranks; rank 0 is the one that speaks with the scheduler."""

    rank: int = 0
    local_rank: int = 0  # which GPU of this node
    size: int = 1
    host: str = ""  # of rank 0's rendezvous; "" if there is one rank
    port: int = 0

    @property
    def alone(self) -> bool:
        """Whether there are no other ranks."""
        return self.size == 1


ALONE = Place()
"""The only rank."""
