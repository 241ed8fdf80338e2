"""Rank 0's side of several ranks: who is asked to come, who is told of a loss, how it ends. Wiring; no torch.

Owns: the team's life in the process of rank 0. Does not own: calls (`engines/linked_ranks.py`), rendezvous (`engines/team.py`).

Invariant: ranks are told of an end that is nobody's loss (done, asked to end, a user's error) and end with exit code 0; without that
word they take rank 0 for dead and end with 75, to be started again (76 where rank 0 is on another node: its own end says why).
A rank that is only silent may have no end that says why: then rank 0 ends with 75, the others with 76, and it is counted once.
"""

from collections.abc import Callable

from streamrl.errors import EXIT_RETRY
from streamrl_workers.trainer.engines.linked_ranks import LinkedRanks, Watch
from streamrl_workers.trainer.engines.links import Loss
from streamrl_workers.trainer.engines.team import Meeting, Team
from streamrl_workers.trainer.settings import Settings

_FAREWELL_S = 5.0
"""For the other ranks to end, before this process does."""


class Leading:
    """The other ranks of this trainer; none if it is alone."""

    def __init__(self, settings: Settings) -> None:
        """Listen for them. A rendezvous that cannot be is the user's error."""
        self._settings = settings
        self._watch = Watch(exit_code=self._exit_code)
        self._told: Callable[[str], None] | None = None
        self._lost: Loss | None = None
        self._team = None if settings.place.alone else Team(meeting(settings), on_lost=self._on_lost)

    def gather(self) -> LinkedRanks | None:
        """Wait for all of them. Raises RetryError naming who did not come."""
        if self._team is None:
            return None
        self._team.gather()
        return LinkedRanks(self._team, watch=self._watch)

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """Be told why, at once or later and from another thread, when a rank is lost."""
        self._told = callback
        if self._lost is not None:
            callback(self._lost.text)

    @property
    def excused(self) -> bool:
        """Whether a rank is lost whose own end says why."""
        return self._lost is not None and not self._lost.silent

    def end(self) -> None:
        """All is over and nobody is lost."""
        if self._team is not None:
            self._team.end(timeout_s=_FAREWELL_S)

    def _on_lost(self, loss: Loss) -> None:
        self._lost = self._lost or loss
        self._watch.lost(loss)
        if self._told is not None:
            self._told(loss.text)

    def _exit_code(self, loss: Loss) -> int:
        return EXIT_RETRY if loss.silent else self._settings.lost_code


def meeting(settings: Settings) -> Meeting:
    """Where and how the ranks of this job meet."""
    return Meeting(place=settings.place, token=settings.token, timeout_s=settings.spec.trainer.rank_timeout_seconds)
