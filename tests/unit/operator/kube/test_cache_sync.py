"""What may be looked at: namespaces of which all is known, each by itself."""

import pytest

from streamrl_operator.kube.answers import KubeError, Status, from_status
from streamrl_operator.kube.cache import CacheSync
from streamrl_operator.kube.kinds import POD, RLJOB

KINDS = (RLJOB, POD)


def error(status: int) -> KubeError:
    return from_status("list pods", status, Status(reason="Because", message="it is so"))


def seen(*namespaces: str) -> CacheSync:
    """All is known everywhere."""
    sight = CacheSync(namespaces, KINDS)
    for namespace in namespaces:
        for kind in KINDS:
            sight.listed(namespace, kind)
    return sight


def test_a_namespace_is_whole_when_all_kinds_are_listed() -> None:
    sight = CacheSync(("a", "b"), KINDS)
    assert sight.unready() == "waits for the first list of pods, rljobs"
    sight.listed("a", RLJOB)
    assert not sight.is_whole("a")
    sight.listed("a", POD)
    assert (sight.is_whole("a"), sight.is_whole("b")) == (True, False)
    sight.listed("b", POD)
    assert sight.unready() == "waits for the first list of rljobs"


def test_all_namespaces_are_one() -> None:
    sight = seen("")
    assert sight.is_whole("any")
    assert sight.unready() == ""


@pytest.mark.parametrize(
    ("namespace", "status", "refused"),
    [("a", 403, True), ("a", 404, True), ("a", 401, False), ("a", 500, False), ("", 403, False), ("", 404, False)],
)
def test_what_is_a_refusal(namespace: str, status: int, refused: bool) -> None:
    sight = seen(namespace)
    assert sight.is_refused(namespace, POD, error(status)) is refused
    assert sight.is_whole("a") is not refused


def test_a_refused_namespace_is_whole_only_when_all_of_it_is_listed_again() -> None:
    sight = seen("a", "b")
    for kind in KINDS:
        sight.is_refused("a", kind, error(403))
    assert sight.unready() == ""  # the other can be worked on
    sight.listed("a", POD)
    assert not sight.is_whole("a")
    sight.listed("a", RLJOB)
    assert sight.is_whole("a")


def test_with_no_namespace_left_there_is_nothing_to_do() -> None:
    sight = seen("a", "b")
    for namespace in ("a", "b"):
        sight.is_refused(namespace, POD, error(403))
    assert sight.unready() == "no namespace may be seen: list pods: 403 Because: it is so"
