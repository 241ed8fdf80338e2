"""The hub's refusals become one line of the user's."""

import pytest

from streamrl.errors import UserError
from streamrl.spec.model import HuggingFaceModel
from streamrl_workers.models import load


@pytest.mark.parametrize("error", [OSError("cannot reach the hub\nsecond line"), ValueError("bad name"), OSError()])
def test_what_the_hub_raises_is_one_line(monkeypatch, error: Exception) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(load, "snapshot_download", refuse)
    with pytest.raises(UserError, match="cannot be fetched") as caught:
        load.download(HuggingFaceModel(name="org/model", revision="v1"))
    assert "org/model@v1" in str(caught.value)
    assert "\n" not in str(caught.value)
