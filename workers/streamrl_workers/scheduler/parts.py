"""The collaborators that share one core, named once."""

from dataclasses import dataclass

from streamrl_workers.scheduler.evaluation import Evaluator
from streamrl_workers.scheduler.fleet import Fleet
from streamrl_workers.scheduler.groups import GroupTable
from streamrl_workers.scheduler.outbox import Outbox
from streamrl_workers.scheduler.production import Production
from streamrl_workers.scheduler.prompts import Planner
from streamrl_workers.scheduler.settings import Settings
from streamrl_workers.scheduler.staleness import Window
from streamrl_workers.scheduler.waiting import WaitingGroups


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What assignment and hand-over work with."""

    settings: Settings
    outbox: Outbox
    groups: GroupTable
    window: Window
    fleet: Fleet
    waiting: WaitingGroups
    production: Production
    evaluator: Evaluator
    planner: Planner
