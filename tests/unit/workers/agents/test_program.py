"""Programs of one user side by side, as real processes: what one can see and do of another."""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from streamrl_workers.agents.program import Program, Programs
from streamrl_workers.process.landlock import REFER_SINCE, SIGNALS_SINCE, interface_version

SOON_S = 60.0
AS_IN_A_CONTAINER = ["setpriv", "--bounding-set", "-perfmon,-sys_admin"] if os.geteuid() == 0 else []
WAITS = "print('here', flush=True); input()"
LOOKS = """
import json, os, sys
other, = map(int, sys.argv[1:])
done = []
for what, act in {
    "environment": lambda: open(f"/proc/{other}/environ", "rb").read(),
    "memory": lambda: open(f"/proc/{other}/mem", "rb").close(),
    "signal": lambda: os.kill(other, 0),
    "own environment": lambda: open("/proc/self/environ", "rb").read(),
    "rename": lambda: [os.makedirs(name) for name in ("a/x", "b")] and os.rename("a/x", "b/x"),
    "own child": lambda: os.waitpid(os.spawnlp(os.P_NOWAIT, "true", "true"), 0),
}.items():
    try:
        act()
        done.append(what)
    except OSError:
        pass
print(json.dumps(done))
"""


async def test_a_program_does_not_look_into_another(tmp_path: Path) -> None:
    """A session's key is in its program's environment. A superuser's programs have the rights of a container's here."""
    programs = Programs()
    try:
        other, _ = start(programs, WAITS, directory=tmp_path)
        async with asyncio.timeout(SOON_S):
            await until(lambda: other.last_line)
            looks, ended = start(programs, LOOKS, str(other.pid), directory=tmp_path)
            assert await ended == 0
    finally:
        programs.close()
    version = interface_version()
    own = ["own environment", "rename", "own child"]
    left = (
        []
        if version >= SIGNALS_SINCE
        else ["signal"]
        if version >= REFER_SINCE
        else ["environment", "memory", "signal"]
    )
    assert json.loads(looks.last_line) == left + own


async def until(holds: Callable[[], object]) -> None:
    while not holds():  # noqa: ASYNC110 - another process
        await asyncio.sleep(0.01)


def start(programs: Programs, code: str, *arguments: str, directory: Path) -> tuple[Program, "asyncio.Future[int]"]:
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    command = [*AS_IN_A_CONTAINER, sys.executable, "-c", code, *arguments]
    program = programs.start(command, directory=directory, environment=dict(os.environ), on_end=ended.set_result)
    return program, ended
