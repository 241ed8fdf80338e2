"""Features that not every job uses, one file each, behind five hooks of the core.

    WorkSource      what a slot works for: training samples, evaluation, log-probs of the frozen model     `generators.py`
    GroupSource     where groups come from: prompts, demonstrations, stored turn states                    `model.py`
    GroupFilter     drops scored groups: dynamic sampling                                                  `rollout.py`
    DeliveryOrder   which group the trainer gets next: arrival, number, whole batches, recorded steps      `delivery.py`
    Extension       looks once after each event: rebalancing, device sharing, ranker, held-out rows        here

`SampleStage` (`rollout.py`) belongs to `WorkSource`: it takes finished samples. The functions below decide which job has which.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from streamrl_workers.scheduler.delivery import Delivery, DeliveryOrder, ReadyGroups, TrainerLink
from streamrl_workers.scheduler.effects import Outbox
from streamrl_workers.scheduler.evaluation import Evaluator
from streamrl_workers.scheduler.extensions.by_number import ByNumber
from streamrl_workers.scheduler.extensions.device_sharing import DeviceSharing
from streamrl_workers.scheduler.extensions.dynamic_sampling import ZeroVarianceFilter
from streamrl_workers.scheduler.extensions.frozen_model import FrozenModel
from streamrl_workers.scheduler.extensions.ranker import RankerQuestions
from streamrl_workers.scheduler.extensions.rebalancing import Rebalancer
from streamrl_workers.scheduler.extensions.supervised import AfterEvaluation, Demonstrations, HeldOutSamples
from streamrl_workers.scheduler.extensions.turn_states import TurnStates
from streamrl_workers.scheduler.generators import Fleet
from streamrl_workers.scheduler.model import GroupSource, GroupTable
from streamrl_workers.scheduler.planning import WaitingGroups
from streamrl_workers.scheduler.rollout import GroupFilter, SampleLifecycle, SampleStage
from streamrl_workers.scheduler.settings import SchedulerSettings


class Extension(Protocol):
    """Looks once after each event."""

    def settle(self) -> None:
        """Do what the event has made possible."""


def reserved_pools(settings: SchedulerSettings) -> frozenset[str]:
    """Return the pools that work for an extension alone."""
    return frozenset({settings.extensions.reference_pool} - {""})


def shared_pools(settings: SchedulerSettings) -> frozenset[str]:
    """Return the pools that are paused now and then while others are not."""
    return frozenset() if settings.extensions.colocated else settings.extensions.shared_pools


def step_cause(settings: SchedulerSettings) -> str:
    """Return why generators and the trainer wait for each other if all share their devices; empty: they do not."""
    return "phase" if settings.extensions.colocated else ""


def sample_stages(
    settings: SchedulerSettings, outbox: Outbox, *, groups: GroupTable, fleet: Fleet
) -> Callable[[SampleLifecycle], Sequence[SampleStage]]:
    """Return what makes the stages of the job for a lifecycle."""

    def make(lifecycle: SampleLifecycle) -> Sequence[SampleStage]:
        if not settings.extensions.reference_pool:
            return ()
        return (FrozenModel(settings, outbox, groups=groups, fleet=fleet, lifecycle=lifecycle),)

    return make


def group_filters(settings: SchedulerSettings) -> Sequence[GroupFilter]:
    """Return the filters of the job."""
    draws = settings.extensions.draws_per_step
    return [ZeroVarianceFilter(draws_per_step=draws, batch_groups=settings.batch_groups)] if draws > 1 else []


def turn_states(settings: SchedulerSettings, *, waiting: WaitingGroups, first: int) -> TurnStates | None:
    """Return the source of turns at stored states; None: the job has no such turns."""
    if not settings.extensions.resampled_percent:
        return None
    return TurnStates(settings, waiting=waiting, first=first)


def default_source(
    settings: SchedulerSettings, prompts: GroupSource, *, groups: GroupTable, fleet: Fleet, lifecycle: SampleLifecycle
) -> GroupSource:
    """Return the source of groups that no other source claims."""
    if not settings.extensions.supervised:
        return prompts
    return Demonstrations(
        groups=groups,
        fleet=fleet,
        lifecycle=lifecycle,
        archived_percent=settings.archived_percent,
        otherwise=prompts,
    )


def ordered(
    settings: SchedulerSettings,
    arrival: DeliveryOrder,
    *,
    groups: GroupTable,
    ready: ReadyGroups,
    link: TrainerLink,
) -> DeliveryOrder:
    """Return the order in which single groups are delivered: `arrival`, or the job's own."""
    by_number = settings.delivery.by_number
    return ByNumber(groups=groups, ready=ready, link=link) if by_number else arrival


def gated(
    settings: SchedulerSettings, order: DeliveryOrder, *, link: TrainerLink, is_due: Callable[[int], bool]
) -> DeliveryOrder:
    """Return the order with what holds a whole step up."""
    return AfterEvaluation(link=link, is_due=is_due, then=order) if settings.extensions.supervised else order


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreParts:
    """What extensions see of the core."""

    outbox: Outbox
    groups: GroupTable
    fleet: Fleet
    waiting: WaitingGroups
    lifecycle: SampleLifecycle
    evaluator: Evaluator
    link: TrainerLink
    delivery: Delivery
    fail: Callable[[str], None]
    """Ends the run with a reason."""


def extensions(settings: SchedulerSettings, core: CoreParts) -> list[Extension]:
    """Return what looks after each event, in order."""
    options, outbox, lifecycle = settings.extensions, core.outbox, core.lifecycle
    found: list[Extension] = []
    if options.shared_pools:
        sharing = DeviceSharing(
            outbox,
            pools=options.shared_pools,
            groups=core.groups,
            fleet=core.fleet,
            lifecycle=lifecycle,
            evaluator=core.evaluator,
            trainer_waits=lambda: core.delivery.trainer_waits,
            moves=not settings.delivery.by_number,
        )
        found.append(sharing)
    if options.rebalance is not None:
        rebalancer = Rebalancer(
            settings,
            options=options.rebalance,
            groups=core.groups,
            fleet=core.fleet,
            waiting=core.waiting,
            lifecycle=lifecycle,
            evaluator=core.evaluator,
        )
        found.append(rebalancer)
    found.extend(lifecycle.stages)
    if options.supervised:
        found.append(HeldOutSamples(settings, outbox, prompts=core.evaluator.prompts, link=core.link, fail=core.fail))
    if lifecycle.lengths.asks:
        found.append(RankerQuestions(outbox, lengths=lifecycle.lengths))
    return found
