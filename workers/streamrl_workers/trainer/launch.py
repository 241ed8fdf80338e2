"""`python -m streamrl_workers.trainer.launch`: all ranks of one node, as local processes. The trainer's container runs it.

      SIGTERM ─▶ LAUNCH ══ rank 0 (speaks with the scheduler)      standard error of all ─▶ ours, by rank
                       ╚══ rank 1, 2, ...

Owns: how many ranks there are (`trainer.processesPerNode` on each of `trainer.nodes`) and which are here, their environment as torchrun would
set it, their common end. With one rank in all this process becomes it. Does not own: restarts; who runs the container has the failure policy.

Loops: `_relay` for each rank (consumes its standard error; produces ours; waits for the rank; unblocked by its end), a watch of its heartbeat, and
the wait for the first end or SIGTERM (no deadline: a run takes as long as it takes).

Invariants: ranks wait for each other in collectives, so when one has ended the others are ended too; no rank outlives this
process (lifeline); the last line of standard error is that of the rank whose end says most, and its exit code is ours.
At SIGTERM rank 0 is asked first, alone: its checkpoint needs the others. On a node without rank 0 all are told, and end when it says so.
"""

import asyncio
import hmac
import os
import secrets
import signal
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl import keys
from streamrl.errors import EXIT_DONE, EXIT_RANK_LOST, EXIT_RETRY, EXIT_USER_ERROR, UserError, UserErrors
from streamrl_workers.process.early_sigterm import exec_worker, exit_on_sigterm

if __name__ == "__main__":  # before imports that take a while
    exit_on_sigterm(exit_code=EXIT_DONE)

from streamrl.spec import read_job
from streamrl.spec.training import Trainer
from streamrl.text import log_to_stderr, say
from streamrl_workers.process.environment_variables import integer, job_file, port, required
from streamrl_workers.process.heartbeat import beat_from, child_environment, kill_when_frozen, start_heartbeat
from streamrl_workers.stream.auth import LOOPBACK
from streamrl_workers.stream.tls import FILE_KEY

_MODULE = "streamrl_workers.trainer"
_SETTLE_S = 1.0
"""Ranks that fail of the same cause end at nearly the same time; the one that says most counts."""
_GROUP_END_S = 5.0
"""Between SIGTERM and SIGKILL for ranks whose group is broken: one that is stuck in a collective hears nothing."""
_FOLLOWER_S = 5.0
"""Rank 0 tells the others when it ends; those that did not hear are ended then."""
_FAREWELL_S = 15.0
"""For rank 0 to end after it has told the others to."""
_LINE_LIMIT_BYTES = 2**20
_SIGNALLED = 128
"""A shell's exit code of a process that a signal ended: this plus the signal."""


@dataclass(slots=True, kw_only=True)
class RankProcess:
    """One process."""

    number: int  # among the ranks of all nodes
    process: asyncio.subprocess.Process
    ended: asyncio.Task[Any]
    last_line: str = ""  # that it wrote to standard error
    relay: asyncio.Task[None] | None = None
    watch: asyncio.Task[None] | None = None
    """Kills it when it is frozen: to the others that is a rank like one that died."""

    @property
    def code(self) -> int | None:
        """Its exit code as a container's; None while it lives."""
        code = self.process.returncode
        return code if code is None or code >= 0 else _SIGNALLED - code

    def send(self, number: signal.Signals) -> None:
        """The signal, if it lives."""
        with suppress(ProcessLookupError):
            self.process.send_signal(number)


def main() -> int:
    """Run the ranks; the exit code."""
    try:
        run_dir = Path(required(os.environ, keys.ENV_RUN_DIR))
        trainer = read_job(job_file(os.environ, run_dir=run_dir)).spec.trainer
        environments = [] if trainer.ranks == 1 else rank_environments(trainer, environ=os.environ)
    except (UserError, UserErrors) as error:
        say(*error.lines)
        return EXIT_USER_ERROR
    if not environments:
        sys.stderr.flush()
        exec_worker([sys.executable, "-m", _MODULE])  # this process is the rank
    return asyncio.run(launch(environments))


async def launch(environments: Sequence[Mapping[str, str]]) -> int:
    """Start a rank for each, wait, end; the exit code."""
    log_to_stderr()
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    start_heartbeat()
    beat_from(loop)
    loop.add_signal_handler(signal.SIGTERM, asked.set)
    loop.add_signal_handler(signal.SIGINT, asked.set)
    lifeline = os.pipe()
    ranks: list[RankProcess] = []
    try:
        for env in environments:
            ranks.append(await _start(int(env[keys.ENV_RANK]), env=env, lifeline=lifeline[0]))  # noqa: PERF401 - those before are ended, too
        await _one_end(ranks, asked=asked)
        telling = await (_orderly(ranks) if asked.is_set() else _broken(ranks))
    finally:
        for rank in _living(ranks):
            rank.send(signal.SIGKILL)
        await _ends(ranks)
        for end in lifeline:
            os.close(end)
        await _last_words(ranks)
    code = telling.code
    assert code is not None, "it has ended"
    if code != EXIT_DONE:
        say(telling.last_line or f"rank {telling.number} ended with exit code {code}")
    return code


def rank_environments(trainer: Trainer, *, environ: Mapping[str, str]) -> list[dict[str, str]]:
    """The environment of each rank of this node.

    Raises:
        UserError: with several nodes, what they need to find each other is missing.
    """
    count = trainer.processes_per_node
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shared = {
        keys.ENV_THREADS: str(max(1, cpus // count)),  # torch's own choice is all of them, for each rank
        **{key: value for key, value in environ.items() if value},
        keys.ENV_WORLD_SIZE: str(trainer.ranks),
        **(_local_rendezvous(environ) if trainer.nodes == 1 else _rendezvous_of_nodes(environ)),
    }
    second = {
        keys.ENV_SIGNALS_PORT: port(environ, keys.ENV_RANK_SIGNALS_PORT),
        keys.ENV_WEIGHTS_PORT: port(environ, keys.ENV_RANK_WEIGHTS_PORT),
    }
    first = count * _node(trainer, environ=environ)
    return [
        {
            **shared,
            **(_own_ports(local, second=second) if local else {}),
            keys.ENV_RANK: str(first + local),
            keys.ENV_LOCAL_RANK: str(local),
            keys.ENV_PROCESS: f"trainer-{first + local}",
        }
        for local in range(count)
    ]


def _own_ports(local: int, *, second: Mapping[str, int]) -> dict[str, str]:
    """Return the ports of a rank above the node's first, which keeps its own. `second`: of the second rank; without one, any is taken."""
    return {key: str(first and first + local - 1) for key, first in second.items()}


def _node(trainer: Trainer, *, environ: Mapping[str, str]) -> int:
    """Which of the nodes this is; rank 0 is on node 0."""
    ordinal = integer(environ, keys.ENV_NODE_ORDINAL)
    node = 0 if ordinal is None else ordinal + 1
    if node >= trainer.nodes:
        raise UserError(field=keys.ENV_NODE_ORDINAL, rule=f"must be below {trainer.nodes - 1}", got=ordinal)
    return node


def _local_rendezvous(environ: Mapping[str, str]) -> dict[str, str]:
    """A rendezvous of this process' own: where certificates do a token's other work, the ranks still need a secret."""
    token = environ.get(keys.ENV_TOKEN) or secrets.token_hex(32)
    return {keys.ENV_TOKEN: token, keys.ENV_MASTER_ADDR: LOOPBACK, keys.ENV_MASTER_PORT: str(_free_port())}


def _rendezvous_of_nodes(environ: Mapping[str, str]) -> dict[str, str]:
    """Where all nodes were told to meet; their secret is the run's, or follows from the key that all trainer pods are given."""
    address = {key: required(environ, key) for key in (keys.ENV_MASTER_ADDR, keys.ENV_MASTER_PORT)}
    return {
        **address,
        keys.ENV_TOKEN: environ.get(keys.ENV_TOKEN) or _token_of_key(Path(required(environ, keys.ENV_TLS_DIR))),
    }


def _token_of_key(directory: Path) -> str:
    """While certificates are renewed two pods may see different keys for some minutes: they do not meet, and try again."""
    try:
        key = (directory / FILE_KEY).read_bytes()
    except OSError as error:
        raise UserError(field=keys.ENV_TLS_DIR, rule=f"cannot be read: {error.strerror}", got=str(directory)) from None
    return hmac.new(key, b"ranks of a trainer", "sha256").hexdigest()


def says_most(ended: Iterable[RankProcess]) -> RankProcess:
    """The rank whose end tells what is wrong: what a person must change, then a crash, then one that asks to be started
    again, then a good end; the first by the order given."""
    order = {EXIT_USER_ERROR: 0, EXIT_RETRY: 2, EXIT_RANK_LOST: 3, EXIT_DONE: 4}
    return min(ended, key=lambda rank: order.get(rank.code if rank.code is not None else EXIT_DONE, 1))


async def _start(number: int, *, env: Mapping[str, str], lifeline: int) -> RankProcess:
    own = child_environment(env[keys.ENV_PROCESS], environ=os.environ)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", _MODULE),
        env={**env, **own, keys.ENV_PARENT_WATCH_FD: str(lifeline)},
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        pass_fds=(lifeline,),
        start_new_session=True,  # a terminal's Ctrl-C reaches us alone; we end the ranks in order
        limit=_LINE_LIMIT_BYTES,
    )
    ended = asyncio.create_task(process.wait(), name=f"end of rank {number}")
    rank = RankProcess(number=number, process=process, ended=ended)
    rank.relay = asyncio.create_task(_relay(rank), name=f"standard error of rank {number}")
    watch = kill_when_frozen(f"rank {number}", environ=own, kill=lambda: rank.send(signal.SIGKILL))
    rank.watch = asyncio.create_task(watch, name=f"heartbeat of rank {number}")
    return rank


async def _relay(rank: RankProcess) -> None:
    stream = rank.process.stderr
    assert stream is not None, "it is a pipe"
    while True:
        try:
            line = await stream.readline()
        except ValueError:  # a line beyond the limit; its rest comes as the next one
            continue
        if not line:
            return
        text = line.decode(errors="replace").rstrip("\n")
        if text.strip():
            rank.last_line = text.strip()
        say(f"[rank {rank.number}] {text}")


def _living(ranks: Iterable[RankProcess]) -> list[RankProcess]:
    return [rank for rank in ranks if rank.code is None]


async def _one_end(ranks: Sequence[RankProcess], *, asked: asyncio.Event) -> None:
    """Until one has ended, or somebody has asked for the end."""
    wish: asyncio.Task[Any] = asyncio.create_task(asked.wait(), name="the wish to end")
    await asyncio.wait([wish, *(rank.ended for rank in ranks)], return_when=asyncio.FIRST_COMPLETED)
    wish.cancel()


async def _ends(ranks: Sequence[RankProcess], *, timeout_s: float | None = None) -> None:
    """Until all have ended, or time is out."""
    if ranks:
        await asyncio.wait([rank.ended for rank in ranks], timeout=timeout_s)


async def _end(ranks: Sequence[RankProcess], *, grace_s: float) -> None:
    """SIGTERM for those that live, and SIGKILL for those that live on."""
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, None)):
        for rank in _living(ranks):
            rank.send(number)
        await _ends(ranks, timeout_s=wait_s)


async def _last_words(ranks: Sequence[RankProcess]) -> None:
    """Until they are written; somebody whom a rank has started may hold its pipe open."""
    relays = [rank.relay for rank in ranks if rank.relay is not None]
    for rank in ranks:
        if rank.watch is not None:
            rank.watch.cancel()
    if relays:
        await asyncio.wait(relays, timeout=_SETTLE_S)
    for relay in relays:
        relay.cancel()


async def _orderly(ranks: Sequence[RankProcess]) -> RankProcess:
    """SIGTERM came: rank 0 keeps what is done and tells the others. Who asked has the deadline.

    Ranks without rank 0 among them end when it tells them, wherever it is.
    """
    first = ranks[0]
    if first.number != 0:
        for rank in _living(ranks):
            rank.send(signal.SIGTERM)
        await _ends(ranks)
        return says_most(ranks)
    first.send(signal.SIGTERM)
    await _ends([first])
    await _ends(ranks, timeout_s=_FOLLOWER_S)
    await _end(ranks, grace_s=_FOLLOWER_S)
    return first


async def _broken(ranks: Sequence[RankProcess]) -> RankProcess:
    """One has ended: at the run's end all do so by themselves; else those that are left are ended."""
    ended = [rank for rank in ranks if rank.code is not None]
    orderly = all(rank.code == EXIT_DONE for rank in ended)
    await _ends(ranks, timeout_s=_FAREWELL_S if orderly else _SETTLE_S)
    by_themselves = ended + [rank for rank in ranks if rank.code is not None and rank not in ended]
    await _end(ranks, grace_s=_GROUP_END_S)
    return says_most(by_themselves)


def _free_port() -> int:
    """A port that is free now: an attempt that follows quickly must not meet the ranks of the one before."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
