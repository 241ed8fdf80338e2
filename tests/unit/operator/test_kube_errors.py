"""What an API server's answer means for the caller's next move."""

import pytest

from streamrl_operator.kube.errors import (
    ConflictError,
    ExpiredError,
    ForbiddenError,
    KubeError,
    NotFoundError,
    RefusedError,
    UnavailableError,
    from_status,
)


@pytest.mark.parametrize(
    ("status", "message", "expected"),
    [
        (403, "not allowed", ForbiddenError),
        (422, "spec.replicas: Invalid value", RefusedError),
        (404, "not found", NotFoundError),
        (409, "the object has been modified", ConflictError),
        (410, "too old resource version", ExpiredError),
        (429, "too many requests", UnavailableError),
        (500, "etcdserver: leader changed", UnavailableError),
        (503, "apiserver not ready", UnavailableError),
        (500, "failed to create typed patch object (n/x; apps/v1): .spec.nonsense: field not declared in schema", RefusedError),
    ],
)  # fmt: skip
def test_a_status_says_whether_asking_again_can_help(status: int, message: str, expected: type[KubeError]) -> None:
    error = from_status("apply /x", status, {"message": message, "reason": "R"})
    assert type(error) is expected
    assert str(error) == f"apply /x: {status} R: {message}"
