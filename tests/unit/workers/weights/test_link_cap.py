"""A bounded link: those who use it wait in turn, and a pause is not made up for."""

import pytest

from streamrl_workers.weights.http_server import LinkCap


def test_senders_wait_in_turn() -> None:
    link = LinkCap(100.0)
    sent = [(50, 10.0), (50, 10.0), (100, 10.5), (10, 20.0), (10, 20.0)]
    waits = [link.wait_s(size, now_s=now_s) for size, now_s in sent]
    assert waits == pytest.approx([0.0, 0.5, 0.5, 0.0, 0.1])
