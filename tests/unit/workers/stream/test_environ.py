"""Pinning a worker to the cores that its environment names."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from streamrl.errors import UserError
from streamrl.keys import ENV_CPUS
from streamrl_workers.stream.environ import cpus, pin_to_cpus


def affinity_after(text: str | None) -> set[int]:
    """What a thread may use after it was pinned; the process's own threads stay as they are."""
    environ = {} if text is None else {ENV_CPUS: text}
    with ThreadPoolExecutor(1) as pool:
        pool.submit(pin_to_cpus, environ).result()
        return set(pool.submit(os.sched_getaffinity, 0).result())


def test_a_thread_is_pinned_to_what_is_listed() -> None:
    usable = os.sched_getaffinity(0)
    one = min(usable)
    assert affinity_after(str(one)) == {one}
    assert affinity_after(", ".join(map(str, usable))) == usable
    assert affinity_after(None) == affinity_after("") == usable


@pytest.mark.parametrize("text", ["0,x", "-1", "1.5", "0;1"])
def test_a_list_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=f"{ENV_CPUS}: must be CPU numbers"):
        cpus({ENV_CPUS: text})


def test_a_cpu_that_is_not_there_is_told() -> None:
    with pytest.raises(UserError, match=f"{ENV_CPUS}: must be CPUs that this process may use"):
        pin_to_cpus({ENV_CPUS: "1000"})
