"""A rank that cannot start ends the start of all, with its own words: a real link and torch's real store."""

import threading
import time
from pathlib import Path

import pytest

from streamrl.errors import UserError
from streamrl_workers.trainer.engines import EngineSetup, codec, failures
from streamrl_workers.trainer.engines.create import create
from streamrl_workers.trainer.engines.linked_ranks import LinkedRanks, Watch
from streamrl_workers.trainer.engines.place import Place
from streamrl_workers.trainer.engines.team import Kind, Meeting, Team, join
from support.ports import free_port
from support.tiny_folder import tiny_folder
from support.trainer_groups import trainer_spec

DEADLINE_S = 30.0
"""Far below what ranks have for loading torch."""


def test_a_rank_without_a_gpu_of_its_own_is_heard_at_once(tmp_path: Path) -> None:
    place = Place(size=2, host="127.0.0.1", port=free_port())
    team = Team(Meeting(place=place, token="t", timeout_s=DEADLINE_S), on_lost=lambda _: None)

    def refuse() -> None:
        link = join(
            Meeting(place=Place(rank=1, size=2, host=place.host, port=place.port), token="t", timeout_s=DEADLINE_S),
            on_lost=lambda _: None,
        )
        link.receive(DEADLINE_S)
        error = UserError(field="LOCAL_RANK", rule="must be below the 1 GPUs of this machine", got=1)
        link.send(Kind.ERROR, codec.encode(failures.describe(error)))

    threading.Thread(target=refuse, daemon=True).start()
    team.gather()
    setup = EngineSetup(
        spec=trainer_spec(processesPerNode=2),
        model_path=str(tiny_folder(tmp_path / "model")),
        threads=1,
        place=place,
        ranks=LinkedRanks(team, watch=Watch()),
    )
    begun_s = time.monotonic()
    with pytest.raises(UserError, match="LOCAL_RANK: must be below the 1 GPUs"):
        create(setup)
    assert time.monotonic() - begun_s < DEADLINE_S
    team.end(timeout_s=0.1)
