"""How ranks find each other, call each other, and notice each other's loss: real sockets and processes."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from streamrl.errors import EXIT_RANK_LOST, UserError
from streamrl_workers.process.daemon_thread import begin_in_thread
from streamrl_workers.trainer.engines.engine import RankEnvironment, RetryError
from streamrl_workers.trainer.engines.process_group import (
    BUILD,
    READY,
    DataRanks,
    ProcessGroup,
    Rendezvous,
    join,
    send_later,
)
from streamrl_workers.trainer.engines.rank_link import (
    FrameKind,
    LostPeer,
    PeerLostError,
    RankLink,
    decode,
    describe_error,
    encode,
)
from streamrl_workers.trainer.engines.setup import EngineSetup
from streamrl_workers.trainer.engines.torch_engine import create
from support.ports import free_port
from support.tiny_folder import tiny_folder
from support.trainer_groups import trainer_spec

SILENCE_S = 5
JOINING = """
import sys, time
from streamrl_workers.process.daemon_thread import begin_in_thread
from streamrl_workers.trainer.engines.engine import RankEnvironment
from streamrl_workers.trainer.engines.process_group import Rendezvous, join
env = RankEnvironment(rank=1, size=2, host="127.0.0.1", port=int(sys.argv[1]))
print("comes", flush=True)
link = join(Rendezvous(env=env, token="t", timeout_s=60.0), on_lost=print)
time.sleep(600)
"""
DEADLINE_S = 60.0


def _pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of one connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        return listener.accept()[0], theirs


class Doubling:
    """What the ranks of these tests compute."""

    def double(self, payload: int) -> int:
        """A number of its own for each rank."""
        return 2 * payload

    def fail(self, payload: int) -> int:
        """Rank 1's disk is full, rank 2 has a bug."""
        if payload == 1:
            raise OSError(28, "No space left on device")
        if payload == 2:
            raise ValueError("a bug")
        return payload

    def fail_when(self, events: tuple[threading.Event, threading.Event]) -> None:
        """As a collective of rank 0 does when another rank ends."""
        begun, lost = events
        begun.set()
        lost.wait(DEADLINE_S)
        raise RuntimeError("connection closed by peer")

    def begin(self, payload: int) -> "Future[int]":
        """The same, when the main thread may do other things."""
        return begin_in_thread(lambda: self.fail(payload), name="begun")

    def late(self, payload: bool) -> "Future[None]":
        """One that has an end only where it is said to have."""
        done: Future[None] = Future()
        if payload:
            done.set_result(None)
        return done


@pytest.fixture
def rendezvous() -> Rendezvous:
    env = RankEnvironment(size=3, host="127.0.0.1", port=free_port())
    return Rendezvous(env=env, token="secret", timeout_s=DEADLINE_S)


def _of_rank(rendezvous: Rendezvous, rank: int) -> Rendezvous:
    return replace(rendezvous, env=replace(rendezvous.env, rank=rank))


def _follow(link: RankLink) -> None:
    """A rank without a model."""
    worker = Doubling()
    while (frame := link.receive(DEADLINE_S)).kind != FrameKind.END:
        value = decode(frame.data)
        try:
            answer = None if value[0] in (READY, BUILD) else getattr(worker, value[0])(value[1])
            if isinstance(answer, Future):
                send_later(link, answer)
                answer = None
            link.send(FrameKind.ANSWER, encode(answer))
        except (OSError, ValueError) as error:
            link.send(FrameKind.ERROR, encode(describe_error(error)))
    link.close()


class World:
    """Three ranks in three threads."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.lost: list[str] = []
        self.told = threading.Event()
        self.group = ProcessGroup(rendezvous)
        self.pool = ThreadPoolExecutor(2)
        joining = [self.pool.submit(join, _of_rank(rendezvous, rank), on_lost=lambda _: None) for rank in (1, 2)]
        self.group.gather()
        self.group.on_lost(self._on_lost)
        self.links = [future.result(DEADLINE_S) for future in joining]

    def ranks(self, follow: Callable[[RankLink], None] = _follow) -> ProcessGroup:
        """All of them, once they follow."""
        self.following = [self.pool.submit(follow, link) for link in self.links]
        self.group.build(Doubling, facts={"port": 1}, timeout_s=DEADLINE_S)
        return self.group

    def close(self) -> None:
        self.group.end(timeout_s=1.0)
        for link in self.links:
            link.close()
        self.pool.shutdown()

    def _on_lost(self, reason: str) -> None:
        self.lost.append(reason)
        self.told.set()


@pytest.fixture
def world(rendezvous: Rendezvous) -> Iterator[World]:
    made = World(rendezvous)
    yield made
    made.close()


def test_every_rank_gets_its_own_payload_and_answers_in_order(world: World) -> None:
    ranks = world.ranks()
    assert ranks.size == 3
    assert ranks.call("double", [1, 2, 3]) == [2, 4, 6]
    world.group.end(timeout_s=DEADLINE_S)
    for following in world.following:
        following.result(DEADLINE_S)  # each was told
    assert world.lost == []  # an end in order is nobody's loss


def test_the_users_error_comes_before_another_ranks_fault(world: World) -> None:
    ranks = world.ranks()
    with pytest.raises(OSError, match="No space left"):
        ranks.call("fail", [0, 2, 1])
    with pytest.raises(RetryError, match="no longer in step"):
        ranks.call("double", [1, 2, 3])


def test_what_a_call_has_begun_ends_beside_other_calls(world: World) -> None:
    ranks = world.ranks()
    begun = ranks.begin("begin", [5, 6, 7])
    assert ranks.call("double", [1, 2, 3]) == [2, 4, 6]
    assert begun.result(DEADLINE_S) == [5, 6, 7]
    with pytest.raises(OSError, match="No space left"):
        ranks.begin("begin", [0, 2, 1]).result(DEADLINE_S)
    assert ranks.call("double", [1, 2, 3]) == [2, 4, 6]  # no rank is out of step
    unanswered = ranks.begin("late", [True, True, False])
    world.links[1].close()
    with pytest.raises(RetryError, match="rank 2 is gone"):
        unanswered.result(DEADLINE_S)


def test_a_rank_that_fails_is_named(world: World) -> None:
    with pytest.raises(RetryError, match=r"rank 2 failed in fail: ValueError: a bug"):
        world.ranks().call("fail", [0, 0, 2])


def test_the_word_of_a_rank_that_ends_in_a_pass_counts_not_its_loss(world: World) -> None:
    """Its end wakes the others, whose collectives then fail."""
    begun = threading.Event()

    def follow(link: RankLink) -> None:
        while decode(link.receive(DEADLINE_S).data)[0] in (READY, BUILD):
            link.send(FrameKind.ANSWER, encode(None))
        assert begun.wait(DEADLINE_S)
        link.send(FrameKind.ERROR, encode(describe_error(UserError(field="spec", rule="must fit the memory"))))
        link.close()

    ranks = world.ranks(follow)
    with pytest.raises(UserError, match=r"^spec: must fit the memory$"):
        ranks.call("fail_when", [(begun, world.told), None, None])


def test_a_rank_that_is_gone_is_named_at_once(world: World) -> None:
    ranks = world.ranks()
    begun_s = time.monotonic()
    world.links[1].close()  # as the kernel does for a killed process
    with pytest.raises(RetryError, match="rank 2 is gone"):
        while True:
            ranks.call("double", [1, 2, 3])
    assert time.monotonic() - begun_s < DEADLINE_S / 2
    assert world.told.wait(DEADLINE_S)  # by a thread of the link
    assert world.lost == ["rank 2 is gone"]


def test_a_rank_that_is_silent_is_named_after_its_deadline() -> None:
    lost, reasons = threading.Event(), list[LostPeer]()
    ours, theirs = _pair()  # nobody beats at the other end: a stopped process

    def on_lost(loss: LostPeer) -> None:
        reasons.append(loss)
        lost.set()

    link = RankLink(ours, peer="rank 1", silence_s=2.0, on_lost=on_lost)
    with theirs, pytest.raises(PeerLostError, match="rank 1 is silent for 2 s"):
        link.receive(DEADLINE_S)
    assert lost.wait(DEADLINE_S)
    assert reasons == [LostPeer("rank 1 is silent for 2 s", silent=True)]


def test_a_peer_that_does_not_read_cannot_hold_up_a_send_for_ever() -> None:
    ours, theirs = _pair()
    link = RankLink(ours, peer="rank 1", silence_s=2.0, on_lost=lambda _: None)
    with theirs, pytest.raises(PeerLostError, match="rank 1 is silent"):
        link.send(FrameKind.CALL, bytes(64 * 2**20))


def test_idle_links_stay_alive_by_their_beats_also_after_a_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than a silence: what holds for three seconds holds for hours. And the clock goes on while a process does not."""
    clock_s = time.monotonic
    ours, theirs = _pair()
    one = RankLink(ours, peer="rank 1", silence_s=2.0, on_lost=lambda _: None)
    other = RankLink(theirs, peer="rank 0", silence_s=2.0, on_lost=lambda _: None)
    monkeypatch.setattr(time, "monotonic", lambda: clock_s() + 3600.0)
    with pytest.raises(TimeoutError):
        one.receive(4.0)
    other.send(FrameKind.ANSWER, b"still here")
    assert one.receive(DEADLINE_S).data == b"still here"
    one.close()
    other.close()


def test_strangers_do_not_get_in(rendezvous: Rendezvous) -> None:
    group = ProcessGroup(rendezvous)
    impatient = replace(rendezvous, timeout_s=1.0)
    with ThreadPoolExecutor(4) as pool:
        strangers = [
            pool.submit(join, replace(_of_rank(impatient, 1), token="guessed"), on_lost=lambda _: None),
            pool.submit(
                join, _of_rank(replace(impatient, env=replace(rendezvous.env, size=4)), 1), on_lost=lambda _: None
            ),
        ]
        gathering = pool.submit(group.gather)
        for stranger in strangers:
            with pytest.raises(RetryError, match=r"rank 0 was not reached .* within 1 s"):
                stranger.result(DEADLINE_S)
        links = [join(_of_rank(rendezvous, rank), on_lost=lambda _: None) for rank in (1, 2)]
        gathering.result(DEADLINE_S)
    for link in (*links, *group.links):
        link.close()


@pytest.mark.parametrize(
    "hello", [b'{"rank": Infinity, "size": 3, "proof": ""}\n', b"[" * 4000 + b"\n", b"[]\n", b"\xff\n", b"x" * 5000]
)
def test_nonsense_of_a_stranger_hurts_nobody(rendezvous: Rendezvous, hello: bytes) -> None:
    group = ProcessGroup(rendezvous)
    with ThreadPoolExecutor(1) as pool:
        gathering = pool.submit(group.gather)
        with socket.create_connection((rendezvous.env.host, rendezvous.env.port)) as stranger:
            stranger.sendall(hello)
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(4096):  # until we are sent away
                    pass
        links = [join(_of_rank(rendezvous, rank), on_lost=lambda _: None) for rank in (1, 2)]
        gathering.result(DEADLINE_S)
    for link in (*links, *group.links):
        link.close()


def test_a_stranger_that_speaks_slowly_does_not_move_the_deadline(rendezvous: Rendezvous) -> None:
    group, ended = ProcessGroup(replace(rendezvous, timeout_s=1.0)), threading.Event()

    def trickle() -> None:
        address = rendezvous.env.host, rendezvous.env.port
        with socket.create_connection(address) as stranger, contextlib.suppress(OSError):  # we are sent away
            while not ended.wait(0.1):
                stranger.sendall(b" ")

    with ThreadPoolExecutor(2) as pool:
        pool.submit(trickle)
        gathering = pool.submit(group.gather)
        try:
            with pytest.raises(RetryError, match="did not come within 1 s"):
                gathering.result(DEADLINE_S)
        finally:
            ended.set()


def test_a_rank_obeys_nobody_who_took_rank_0s_port(rendezvous: Rendezvous) -> None:
    def impostor(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, connection.makefile("rwb") as stream:
            stream.write(b"a challenge\n")
            stream.flush()
            stream.readline()
            stream.write(b"welcome\n")

    with (
        socket.create_server((rendezvous.env.host, rendezvous.env.port)) as listener,
        ThreadPoolExecutor(1) as pool,
    ):
        pretending = pool.submit(impostor, listener)
        with pytest.raises(RetryError, match="rank 0 was not reached"):
            join(replace(_of_rank(rendezvous, 1), timeout_s=1.0), on_lost=lambda _: None)
        pretending.result(DEADLINE_S)


def test_who_does_not_come_is_named(rendezvous: Rendezvous) -> None:
    group = ProcessGroup(replace(rendezvous, timeout_s=1.0))
    with pytest.raises(RetryError, match=r"ranks 1, 2 did not come within 1 s"):
        group.gather()


def test_without_rank_0_a_rank_gives_up(rendezvous: Rendezvous) -> None:
    with pytest.raises(RetryError, match=r"rank 0 was not reached at 127.0.0.1:\d+ within 1 s"):
        join(replace(_of_rank(rendezvous, 1), timeout_s=1.0), on_lost=lambda _: None)


def test_a_rendezvous_in_use_is_the_users_error(rendezvous: Rendezvous) -> None:
    with (
        socket.create_server(("", rendezvous.env.port)),
        pytest.raises(UserError, match=r"MASTER_PORT: cannot be bound: .*in use"),
    ):
        ProcessGroup(rendezvous)


def test_a_rank_without_a_gpu_of_its_own_is_heard_at_once(tmp_path: Path) -> None:
    """With torch's real store: a rank that cannot start ends the start of all, with its own words."""
    env = RankEnvironment(size=2, host="127.0.0.1", port=free_port())
    rendezvous = Rendezvous(env=env, token="t", timeout_s=DEADLINE_S)
    group = ProcessGroup(rendezvous)

    def refuse() -> None:
        link = join(_of_rank(rendezvous, 1), on_lost=lambda _: None)
        link.receive(DEADLINE_S)
        error = UserError(field="LOCAL_RANK", rule="must be below the 1 GPUs of this machine", got=1)
        link.send(FrameKind.ERROR, encode(describe_error(error)))

    threading.Thread(target=refuse, daemon=True).start()
    setup = EngineSetup(
        spec=trainer_spec(processesPerNode=2),
        model_path=str(tiny_folder(tmp_path / "model")),
        threads=1,
        env=env,
        ranks=group.gather(),
    )
    begun_s = time.monotonic()
    with pytest.raises(UserError, match="LOCAL_RANK: must be below the 1 GPUs"):
        create(setup)
    assert time.monotonic() - begun_s < DEADLINE_S
    group.end(timeout_s=0.1)


class OtherNode:
    """Rank 0 on one node, and a process that is rank 1 on another."""

    def __init__(self) -> None:
        env = RankEnvironment(size=2, host="127.0.0.1", port=free_port())
        self.reasons: list[str] = []
        self.told = threading.Event()
        self.other = subprocess.Popen([sys.executable, "-c", JOINING, str(env.port)], stdout=subprocess.PIPE)
        assert self.other.stdout is not None
        assert self.other.stdout.readline() == b"comes\n"  # a start may take longer than a silence
        self.group = ProcessGroup(Rendezvous(env=env, token="t", timeout_s=SILENCE_S), lost_code=EXIT_RANK_LOST)
        self.group.gather()
        self.group.on_lost(self._tell)

    def _tell(self, reason: str) -> None:
        self.reasons.append(reason)
        self.told.set()

    def lose(self, number: signal.Signals) -> str:
        """Rank 1 gets the signal; what is said of it."""
        os.kill(self.other.pid, number)
        assert self.told.wait(DEADLINE_S), "nobody was told"
        return self.reasons[0]

    def close(self) -> None:
        self.other.kill()
        self.other.communicate()
        self.group.end()


@pytest.fixture
def met() -> Iterator[OtherNode]:
    made = OtherNode()
    yield made
    made.close()


def test_a_rank_that_died_has_an_end_of_its_own_to_count(met: OtherNode) -> None:
    assert met.lose(signal.SIGKILL) == "rank 1 is gone"
    assert met.group.excused


def test_a_rank_that_is_silent_may_have_none_so_this_end_is_counted(met: OtherNode) -> None:
    assert met.lose(signal.SIGSTOP) == f"rank 1 is silent for {SILENCE_S} s"
    assert not met.group.excused


def test_ranks_of_a_data_rank_get_its_payload_and_the_first_answers() -> None:
    class Recording:
        size = 4

        def call(self, method: str, payloads: list[int]) -> list[str]:
            return [f"{method} {payload} on {rank}" for rank, payload in enumerate(payloads)]

    ranks = DataRanks(Recording(), copies=2)
    assert ranks.size == 2
    assert ranks.call("double", [5, 6]) == ["double 5 on 0", "double 6 on 2"]
