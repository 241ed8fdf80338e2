"""A pool and a trainer as clocks alone: both work at once, the slower one sets the pace. For the autoscaler."""

from dataclasses import dataclass, field

from streamrl_operator.autoscaler.values import ConnectedReplica, PoolObservation, ProcessTimes

SLOTS = 8


@dataclass(slots=True)
class PoolWorld:
    """Generators that share a step's work, and a trainer."""

    replicas: int
    splits: float = 1.0
    """n replicas are as fast as n to this power of one: 1 where work splits evenly, 0 where another one brings nothing."""
    now_s: float = 0.0
    steps: float = 0.0
    since_step_s: float = 0.0
    waiting: int = 0
    trainer: list[float] = field(default_factory=lambda: [0.0, 0.0])
    clocks: dict[int, list[float]] = field(default_factory=dict)

    def advance(self, seconds: float, *, work_s: float, train_s: float) -> None:
        """Let time pass; a step is `work_s` of one generator's time and `train_s` of the trainer's. A token is 1 ms of it."""
        generation_s = work_s / self.replicas**self.splits
        interval_s = max(generation_s, train_s)
        self.now_s += seconds
        before, self.steps = int(self.steps), self.steps + seconds / interval_s
        ended = int(self.steps) > before
        self.since_step_s = (self.steps - int(self.steps)) * interval_s if ended else self.since_step_s + seconds
        self.clocks = {n: self.clocks.get(n, [0.0, 0.0, 0.0]) for n in range(self.replicas)}
        for clock in self.clocks.values():
            clock[0] += seconds
            clock[1] += seconds * (1 - generation_s / interval_s)
            clock[2] += 1e3 * work_s * seconds / interval_s / self.replicas
        self.trainer[0] += seconds
        self.trainer[1] += seconds * (1 - train_s / interval_s)

    def see(self) -> PoolObservation:
        """What the scheduler's page shows now."""
        return PoolObservation(
            at_s=self.now_s,
            attempt=1,
            step=int(self.steps),
            waiting=self.waiting,
            replicas=tuple(
                ConnectedReplica(
                    name=f"generator-p-{n}",
                    slots=SLOTS,
                    active=SLOTS,
                    clock=ProcessTimes(wall_s=wall, idle_s=idle),
                    tokens=tokens,
                )
                for n, (wall, idle, tokens) in self.clocks.items()
            ),
            trainer=ProcessTimes(wall_s=self.trainer[0], idle_s=self.trainer[1]),
            since_step_s=self.since_step_s,
        )
