"""A version that cannot be brought to where generators find it ends the waits for its samples."""

from collections.abc import Callable

import pytest

from streamrl.errors import UserError
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.stream.object_store import StoreUnavailableError
from streamrl_workers.trainer.engines.engine import RetryError
from streamrl_workers.trainer.session import Session, StoppedError
from streamrl_workers.trainer.step_loop import Publishing, offer_of
from streamrl_workers.weights.hashing import TensorBytes
from streamrl_workers.weights.store import WeightStore
from support.trainer_groups import trainer_spec
from support.trainer_settings import trainer_settings

TENSORS = {"w": TensorBytes("uint8", (4,), memoryview(b"abcd"))}


def session() -> Session:
    identity = pb.TrainerHello(trainer_id="trainer-0", instance="one")
    return Session(identity, step=0, window_bytes=2**20, checkpoint_path="")


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (StoreUnavailableError("not within 9 s"), RetryError, "weights: not within 9 s"),
        (UserError(field="url", rule="must be there"), UserError, "url: must be there"),
        (KeyError("content"), RetryError, r"weights: KeyError\('content'\)"),
    ],
)
def test_its_error_is_that_of_the_session(error: Exception, kind: type[Exception], text: str) -> None:
    asked = session()

    def offer(*_: object, **__: object) -> bool:
        raise error

    with Publishing(asked, store=WeightStore(), offer=offer, attempt=1) as publishing:
        publishing.begin(0, TENSORS)
        with pytest.raises(kind, match=text):
            publishing.wait()
    with pytest.raises(kind, match=text):
        asked.poll()


def test_the_end_of_the_session_is_heard_while_a_version_is_offered() -> None:
    asked, stopped = session(), StoppedError("it is done")

    def offer(_: object, *, ended: Callable[[], bool]) -> bool:
        asked.end(stopped)
        return not ended()

    with Publishing(asked, store=WeightStore(), offer=offer, attempt=1) as publishing:
        publishing.begin(0, TENSORS)
        with pytest.raises(StoppedError, match="it is done"):
            publishing.wait()


def test_a_process_that_is_to_end_announces_no_version_that_is_not_there() -> None:
    asked = session()
    asked.terminate()
    store = WeightStore()
    with Publishing(asked, store=store, offer=lambda _, ended: not ended(), attempt=1) as publishing:
        publishing.begin(0, TENSORS)
        publishing.wait()
        assert publishing.newest_hash == store.versions()[0].hash


@pytest.mark.parametrize(
    ("rule", "generators", "expected"),
    [("grpo", True, [*range(11)]), ("supervised", True, [0, 10]), ("supervised", False, [])],
)
def test_only_versions_that_generators_are_told_of_are_offered(
    rule: str, generators: bool, expected: list[int]
) -> None:
    spec = trainer_spec(rule=rule, steps=10)
    spec = spec if generators else spec.model_copy(update={"generators": []})
    assert spec.task.evaluation.interval_steps >= 10
    asked: list[int] = []

    def server(version: pb.VersionName, *, ended: object) -> bool:
        asked.append(version.step)
        return True

    offer = offer_of(trainer_settings(spec).is_offered, server=server)
    assert all(offer(pb.VersionName(step=step), ended=lambda: False) for step in range(11))
    assert asked == expected
