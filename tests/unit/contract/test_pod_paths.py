"""Where a job may mount what: one spelling for each directory, and never over or under what the operator mounts."""

import posixpath

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from streamrl import names
from streamrl.spec.volumes import VolumeMount

OURS = [value for key, value in vars(names).items() if key.startswith("DIR_")]
PARTS = st.sampled_from(
    ["", ".", "..", "...", ".a", "a.", "etc", "var", "lib", "streamrl", "streamrl2", "tls", "ETC", "a b", "\n", ":"]
)
PATHS = st.lists(PARTS, max_size=7).map(lambda parts: "/" + "/".join(parts)) | st.text(alphabet="/.:e\n", max_size=8)


def accepts(**fields: str) -> bool:
    try:
        VolumeMount.model_validate({"name": "v", "mountPath": "/data"} | fields)
    except ValidationError:
        return False
    return True


@given(PATHS)
def test_a_path_that_is_taken_has_one_spelling_and_is_apart_from_ours(path: str) -> None:
    if accepts(mountPath=path):
        assert posixpath.normpath(path) == path
        assert path.startswith("/")
        assert not any(
            posixpath.commonpath([path, ours]) in (path, "/etc/streamrl", "/var/lib/streamrl") for ours in OURS
        )


@given(PATHS)
def test_a_path_in_a_volume_stays_in_it(path: str) -> None:
    for sub in (path, path[1:]):
        if accepts(subPath=sub):
            assert not sub.startswith("/")
            assert posixpath.normpath(sub) == sub
            assert ".." not in sub.split("/")


@pytest.mark.parametrize(
    "path", ["/data", "/tmp", "/dev/shm", "/etc/streamrl2", "/etc/ssl", "/a..b/...", "/.cache", "/ETC/streamrl"]
)
def test_all_other_paths_are_free(path: str) -> None:
    assert accepts(mountPath=path)
    assert accepts(subPath=path[1:])
