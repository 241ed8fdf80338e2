"""Why a scored group of a journal is in no step: the core itself is asked, as a scheduler and a trainer that start now would have it."""

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.core import Core
from streamrl_workers.scheduler.effects import DeliverGroup, Write
from streamrl_workers.scheduler.history import first_unrecorded
from streamrl_workers.scheduler.records import Dropped, Recovered
from streamrl_workers.scheduler.settings import SchedulerSettings

_CREDIT_BYTES = 1 << 62
"""Room for all groups: how much a trainer has is not in the journal."""


def delivery_of(group_id: int, *, recovered: Recovered, settings: SchedulerSettings) -> str | None:
    """Return what is next for a group that is scored and in no step that counts; None: the group is in another state."""
    scored = {group.group_id for group in recovered.groups if group.start_version is not None}
    if group_id not in scored or recovered.ended:
        return None
    for step, group_ids in recovered.compositions.items():
        if group_id in group_ids:
            return f"step {step} is taken again, with this group" if step >= recovered.step else None
    core, step = Core(settings, recovered), first_unrecorded(recovered)
    hello = pb.TrainerHello(instance="none of the journal", step=step, checkpoint_step=step)
    effects = [*core.start(0.0), *core.trainer_joined(hello), *core.credit(_CREDIT_BYTES)]
    written = [effect for effect in effects if isinstance(effect, Write)]
    effects += core.committed(written[-1].sequence)
    for write in written:
        if isinstance(write.record, Dropped) and write.record.group_id == group_id:
            return f"dropped at the next start: {write.record.reason}"
    if any(isinstance(effect, DeliverGroup) and effect.group_id == group_id for effect in effects):
        return f"may be in step {step}: a trainer that connects now gets it"
    why = core.view().undelivered
    assert why is not None, "the trainer has connected"
    return f"not delivered in step {step}: {why.value}"
