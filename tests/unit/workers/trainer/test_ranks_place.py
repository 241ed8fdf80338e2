"""A rank's place, as torchrun's variables say it."""

import pytest

from streamrl.errors import UserError
from streamrl_workers.trainer.engines.place import ALONE, Place
from streamrl_workers.trainer.settings import read_place

MASTER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, ALONE),
        ({"RANK": "0", "WORLD_SIZE": "1"}, ALONE),
        (
            {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", **MASTER},
            Place(rank=3, local_rank=1, size=4, host="127.0.0.1", port=29500),
        ),
        ({"WORLD_SIZE": "2", **MASTER}, Place(size=2, host="127.0.0.1", port=29500)),
    ],
)
def test_a_place_is_read(environ: dict[str, str], place: Place) -> None:
    assert read_place(environ) == place


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2", **MASTER}, r"^RANK: must be below WORLD_SIZE \(2\), got 2"),
        ({"RANK": "1"}, r"^RANK: must be below WORLD_SIZE \(1\), got 1"),
        ({"WORLD_SIZE": "0"}, r"^RANK: must be below WORLD_SIZE \(0\), got 0"),
        ({"RANK": "-1", "WORLD_SIZE": "2", **MASTER}, "^RANK: must be a whole number"),
        ({"WORLD_SIZE": "2", "MASTER_PORT": "1"}, "^MASTER_ADDR: must be set"),
        (
            {"WORLD_SIZE": "2", "MASTER_ADDR": "host"},
            "^MASTER_PORT: must be a port from 1 to 65535 with WORLD_SIZE above 1",
        ),
    ],
)
def test_a_place_that_cannot_be_is_the_users_error(environ: dict[str, str], text: str) -> None:
    with pytest.raises(UserError, match=text):
        read_place(environ)
