"""How ranks find each other, and notice each other's loss: real sockets, no torch."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from streamrl.errors import UserError
from streamrl_workers.trainer.endings import RetryError
from streamrl_workers.trainer.engines import codec, failures
from streamrl_workers.trainer.engines.linked_ranks import LinkedRanks, Watch
from streamrl_workers.trainer.engines.links import Link, Loss, LostError
from streamrl_workers.trainer.engines.place import Place
from streamrl_workers.trainer.engines.team import Kind, Meeting, Team, join
from support.ports import free_port

DEADLINE_S = 20.0


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


@pytest.fixture
def meeting() -> Meeting:
    place = Place(size=3, host="127.0.0.1", port=free_port())
    return Meeting(place=place, token="secret", timeout_s=DEADLINE_S)


def _of_rank(meeting: Meeting, rank: int) -> Meeting:
    return replace(meeting, place=replace(meeting.place, rank=rank))


def _follow(link: Link) -> None:
    """A rank without a model."""
    worker = Doubling()
    while (frame := link.receive(DEADLINE_S)).kind != Kind.END:
        value = codec.decode(frame.data)
        try:
            answer = None if frame.kind == Kind.BUILD else getattr(worker, value[0])(value[1])
            link.send(Kind.ANSWER, codec.encode(answer))
        except (OSError, ValueError) as error:
            link.send(Kind.ERROR, codec.encode(failures.describe(error)))
    link.close()


class World:
    """Three ranks in three threads."""

    def __init__(self, meeting: Meeting) -> None:
        self.lost: list[Loss] = []
        self.told = threading.Event()
        self.watch = Watch()
        self.team = Team(meeting, on_lost=self._on_lost)
        self.pool = ThreadPoolExecutor(2)
        joining = [self.pool.submit(join, _of_rank(meeting, rank), on_lost=lambda _: None) for rank in (1, 2)]
        self.team.gather()
        self.links = [future.result(DEADLINE_S) for future in joining]

    def ranks(self, follow: Callable[[Link], None] = _follow) -> LinkedRanks:
        """All of them, once they follow."""
        self.following = [self.pool.submit(follow, link) for link in self.links]
        ranks = LinkedRanks(self.team, watch=self.watch)
        ranks.build(Doubling, facts={"port": 1}, timeout_s=DEADLINE_S)
        return ranks

    def close(self) -> None:
        self.team.end(timeout_s=1.0)
        for link in self.links:
            link.close()
        self.pool.shutdown()

    def _on_lost(self, loss: Loss) -> None:
        self.lost.append(loss)
        self.watch.lost(loss)
        self.told.set()


@pytest.fixture
def world(meeting: Meeting) -> Iterator[World]:
    made = World(meeting)
    yield made
    made.close()


def test_every_rank_gets_its_own_payload_and_answers_in_order(world: World) -> None:
    ranks = world.ranks()
    assert ranks.size == 3
    assert ranks.call("double", [1, 2, 3]) == [2, 4, 6]
    world.team.end(timeout_s=DEADLINE_S)
    for following in world.following:
        following.result(DEADLINE_S)  # each was told
    assert world.lost == []  # an end in order is nobody's loss


def test_the_users_error_comes_before_another_ranks_fault(world: World) -> None:
    ranks = world.ranks()
    with pytest.raises(OSError, match="No space left"):
        ranks.call("fail", [0, 2, 1])
    with pytest.raises(RetryError, match="no longer in step"):
        ranks.call("double", [1, 2, 3])


def test_a_rank_that_fails_is_named(world: World) -> None:
    with pytest.raises(RetryError, match=r"rank 2 failed in fail: ValueError: a bug"):
        world.ranks().call("fail", [0, 0, 2])


def test_a_rank_that_is_gone_is_named_at_once(world: World) -> None:
    ranks = world.ranks()
    begun_s = time.monotonic()
    world.links[1].close()  # as the kernel does for a killed process
    with pytest.raises(RetryError, match="rank 2 is gone"):
        while True:
            ranks.call("double", [1, 2, 3])
    assert time.monotonic() - begun_s < DEADLINE_S / 2
    assert world.told.wait(DEADLINE_S)  # by a thread of the link
    assert world.lost == [Loss("rank 2 is gone")]


def test_a_rank_that_is_silent_is_named_after_its_deadline() -> None:
    lost, reasons = threading.Event(), list[Loss]()
    ours, theirs = _pair()  # nobody beats at the other end: a stopped process

    def on_lost(loss: Loss) -> None:
        reasons.append(loss)
        lost.set()

    link = Link(ours, peer="rank 1", silence_s=2.0, on_lost=on_lost)
    with theirs, pytest.raises(LostError, match="rank 1 is silent for 2 s"):
        link.receive(DEADLINE_S)
    assert lost.wait(DEADLINE_S)
    assert reasons == [Loss("rank 1 is silent for 2 s", silent=True)]


def test_a_peer_that_does_not_read_cannot_hold_up_a_send_for_ever() -> None:
    ours, theirs = _pair()
    link = Link(ours, peer="rank 1", silence_s=2.0, on_lost=lambda _: None)
    with theirs, pytest.raises(LostError, match="rank 1 is silent"):
        link.send(Kind.CALL, bytes(64 * 2**20))


def test_idle_links_stay_alive_by_their_beats() -> None:
    """Longer than a silence: what holds for three seconds holds for hours."""
    ours, theirs = _pair()
    one = Link(ours, peer="rank 1", silence_s=2.0, on_lost=lambda _: None)
    other = Link(theirs, peer="rank 0", silence_s=2.0, on_lost=lambda _: None)
    with pytest.raises(TimeoutError):
        one.receive(4.0)
    other.send(Kind.ANSWER, b"still here")
    assert one.receive(DEADLINE_S).data == b"still here"
    one.close()
    other.close()


def test_strangers_do_not_get_in(meeting: Meeting) -> None:
    team = Team(meeting, on_lost=lambda _: None)
    impatient = replace(meeting, timeout_s=1.0)
    with ThreadPoolExecutor(4) as pool:
        strangers = [
            pool.submit(join, replace(_of_rank(impatient, 1), token="guessed"), on_lost=lambda _: None),
            pool.submit(
                join, _of_rank(replace(impatient, place=replace(meeting.place, size=4)), 1), on_lost=lambda _: None
            ),
        ]
        gathering = pool.submit(team.gather)
        for stranger in strangers:
            with pytest.raises(RetryError, match=r"rank 0 was not reached .* within 1 s"):
                stranger.result(DEADLINE_S)
        links = [join(_of_rank(meeting, rank), on_lost=lambda _: None) for rank in (1, 2)]
        gathering.result(DEADLINE_S)
    for link in (*links, *team.links):
        link.close()


@pytest.mark.parametrize(
    "hello", [b'{"rank": Infinity, "size": 3, "proof": ""}\n', b"[" * 4000 + b"\n", b"[]\n", b"\xff\n", b"x" * 5000]
)
def test_nonsense_of_a_stranger_hurts_nobody(meeting: Meeting, hello: bytes) -> None:
    team = Team(meeting, on_lost=lambda _: None)
    with ThreadPoolExecutor(1) as pool:
        gathering = pool.submit(team.gather)
        with socket.create_connection((meeting.place.host, meeting.place.port)) as stranger:
            stranger.sendall(hello)
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(4096):  # until we are sent away
                    pass
        links = [join(_of_rank(meeting, rank), on_lost=lambda _: None) for rank in (1, 2)]
        gathering.result(DEADLINE_S)
    for link in (*links, *team.links):
        link.close()


def test_a_stranger_that_speaks_slowly_does_not_move_the_deadline(meeting: Meeting) -> None:
    team, ended = Team(replace(meeting, timeout_s=1.0), on_lost=lambda _: None), threading.Event()

    def trickle() -> None:
        address = meeting.place.host, meeting.place.port
        with socket.create_connection(address) as stranger, contextlib.suppress(OSError):  # we are sent away
            while not ended.wait(0.1):
                stranger.sendall(b" ")

    with ThreadPoolExecutor(2) as pool:
        pool.submit(trickle)
        gathering = pool.submit(team.gather)
        try:
            with pytest.raises(RetryError, match="did not come within 1 s"):
                gathering.result(DEADLINE_S)
        finally:
            ended.set()


def test_a_rank_obeys_nobody_who_took_rank_0s_port(meeting: Meeting) -> None:
    def impostor(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, connection.makefile("rwb") as stream:
            stream.write(b"a challenge\n")
            stream.flush()
            stream.readline()
            stream.write(b"welcome\n")

    with (
        socket.create_server((meeting.place.host, meeting.place.port)) as listener,
        ThreadPoolExecutor(1) as pool,
    ):
        pretending = pool.submit(impostor, listener)
        with pytest.raises(RetryError, match="rank 0 was not reached"):
            join(replace(_of_rank(meeting, 1), timeout_s=1.0), on_lost=lambda _: None)
        pretending.result(DEADLINE_S)


def test_who_does_not_come_is_named(meeting: Meeting) -> None:
    team = Team(replace(meeting, timeout_s=1.0), on_lost=lambda _: None)
    with pytest.raises(RetryError, match=r"ranks 1, 2 did not come within 1 s"):
        team.gather()


def test_without_rank_0_a_rank_gives_up(meeting: Meeting) -> None:
    with pytest.raises(RetryError, match=r"rank 0 was not reached at 127.0.0.1:\d+ within 1 s"):
        join(replace(_of_rank(meeting, 1), timeout_s=1.0), on_lost=lambda _: None)


def test_a_rendezvous_in_use_is_the_users_error(meeting: Meeting) -> None:
    with (
        socket.create_server(("", meeting.place.port)),
        pytest.raises(UserError, match=r"MASTER_PORT: cannot be bound: .*in use"),
    ):
        Team(meeting, on_lost=lambda _: None)
