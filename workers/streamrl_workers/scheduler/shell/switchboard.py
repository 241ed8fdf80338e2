"""Who is connected: the links of all generators and of the trainer, and what they last said of themselves.

Owns the mapping from names to links. Does not own decisions: the core has its own view of who is
alive, fed by the same connections.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.effects import HandGroup
from streamrl_workers.scheduler.shell.link import Link
from streamrl_workers.scheduler.shell.rates import BeatWindow
from streamrl_workers.scheduler.shell.wire import group_command


@dataclass(slots=True, kw_only=True)
class GeneratorEntry:
    """One connected generator."""

    link: Link
    hello: pb.GeneratorHello
    version_step: int | None
    """Weights in its engine."""
    beats: BeatWindow
    heartbeat: pb.Heartbeat = field(default_factory=pb.Heartbeat)


@dataclass(slots=True, kw_only=True)
class TrainerEntry:
    """The connected trainer."""

    link: Link
    hello: pb.TrainerHello
    beats: BeatWindow
    heartbeat: pb.TrainerHeartbeat = field(default_factory=pb.TrainerHeartbeat)


class Switchboard:
    """Links by name. One link per generator, one trainer: a new connection replaces the old one."""

    def __init__(self) -> None:
        self._generators: dict[str, GeneratorEntry] = {}
        self._trainer: TrainerEntry | None = None
        self._stop: str | None = None
        self._trainer_told = False
        self._changed = asyncio.Event()

    @property
    def generators(self) -> Mapping[str, GeneratorEntry]:
        """Connected generators by id."""
        return self._generators

    @property
    def trainer(self) -> TrainerEntry | None:
        """The connected trainer."""
        return self._trainer

    def add_generator(self, entry: GeneratorEntry) -> GeneratorEntry | None:
        """Connect; the entry that it replaces, if the generator was connected already."""
        old = self._generators.pop(entry.hello.generator_id, None)
        if old is not None:
            old.link.end()
        self._generators[entry.hello.generator_id] = entry
        return old

    def remove_generator(self, entry: GeneratorEntry) -> bool:
        """Disconnect; False if a newer connection has replaced this one."""
        if self._generators.get(entry.hello.generator_id) is not entry:
            return False
        del self._generators[entry.hello.generator_id]
        self._changed.set()
        return True

    def set_trainer(self, entry: TrainerEntry) -> TrainerEntry | None:
        """Connect the trainer; the entry that it replaces."""
        old, self._trainer = self._trainer, entry
        if old is not None:
            old.link.end()
        return old

    def remove_trainer(self, entry: TrainerEntry) -> bool:
        """Disconnect; False if a newer connection has replaced this one."""
        if self._trainer is not entry:
            return False
        self._trainer = None
        self._changed.set()
        return True

    def to_generator(self, generator_id: str, command: pb.GeneratorCommand) -> None:
        """Send; a command for one that has just left is lost, as its connection is (the core hears of that)."""
        entry = self._generators.get(generator_id)
        if entry is not None:
            entry.link.send(command)

    def to_trainer(self, command: pb.TrainerCommand) -> None:
        """Send to the trainer, if it is connected."""
        if self._trainer is not None:
            self._trainer.link.send(command)

    def stop_all(self, reason: str) -> None:
        """Tell everybody to end, also those who connect from now on."""
        self._stop = reason
        for entry in self._generators.values():
            self.stop_generator(entry)
        if self._trainer is not None:
            self.stop_trainer(self._trainer)

    @property
    def stopping(self) -> bool:
        """Whether everybody has been told to end."""
        return self._stop is not None

    def hand_group(self, effect: HandGroup) -> None:
        """Send a group to the trainer, if it is connected."""
        if self._trainer is not None:
            self._trainer.link.send_later(effect.size_bytes, lambda: group_command(effect))

    async def wait_until_told(self, *, timeout_s: float) -> bool:
        """Wait until the trainer and all connected generators have been told and are gone; False if time ran out."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._generators or self._trainer is not None or not self._trainer_told:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def stop_generator(self, entry: GeneratorEntry) -> None:
        """Tell one generator to end."""
        entry.link.send(pb.GeneratorCommand(stop=pb.Stop(reason=self._stop or "")))
        entry.link.end()

    def stop_trainer(self, entry: TrainerEntry) -> None:
        """Tell the trainer to end."""
        self._trainer_told = True
        entry.link.send(pb.TrainerCommand(stop=pb.Stop(reason=self._stop or "")))
        entry.link.end()
