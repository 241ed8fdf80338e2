"""Rank 0 and the end of another rank's process: whose end is counted."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from streamrl_workers.trainer.engines.place import Place
from streamrl_workers.trainer.leading import Leading
from support.ports import free_port
from support.trainer_groups import trainer_spec
from support.trainer_settings import trainer_settings

SILENCE_S = 5
DEADLINE_S = 60.0
JOINING = """
import sys, time
from streamrl_workers.trainer.engines.place import Place
from streamrl_workers.trainer.engines.team import Meeting, join
place = Place(rank=1, size=2, host="127.0.0.1", port=int(sys.argv[1]))
link = join(Meeting(place=place, token="t", timeout_s=60.0), on_lost=print)
print("here", flush=True)
time.sleep(600)
"""


class Met:
    """Rank 0 on one node, and a process that is rank 1 on another."""

    def __init__(self) -> None:
        place = Place(size=2, host="127.0.0.1", port=free_port())
        spec = trainer_spec(nodes=2, rankTimeoutSeconds=SILENCE_S)
        self.leading = Leading(replace(trainer_settings(spec), place=place, token="t"))
        self.reasons: list[str] = []
        self.told = threading.Event()
        self.other = subprocess.Popen([sys.executable, "-c", JOINING, str(place.port)], stdout=subprocess.PIPE)
        self.leading.gather()
        self.leading.on_lost(self._tell)

    def _tell(self, reason: str) -> None:
        self.reasons.append(reason)
        self.told.set()

    def lose(self, number: signal.Signals) -> str:
        """Rank 1 gets the signal; what is said of it."""
        os.kill(self.other.pid, number)
        assert self.told.wait(DEADLINE_S), "nobody was told"
        return self.reasons[0]

    def close(self) -> None:
        self.other.kill()
        self.other.communicate()
        self.leading.end()


@pytest.fixture
def met() -> Iterator[Met]:
    made = Met()
    yield made
    made.close()


def test_a_rank_that_died_has_an_end_of_its_own_to_count(met: Met) -> None:
    assert met.lose(signal.SIGKILL) == "rank 1 is gone"
    assert met.leading.excused


def test_a_rank_that_is_silent_may_have_none_so_this_end_is_counted(met: Met) -> None:
    assert met.lose(signal.SIGSTOP) == f"rank 1 is silent for {SILENCE_S} s"
    assert not met.leading.excused
