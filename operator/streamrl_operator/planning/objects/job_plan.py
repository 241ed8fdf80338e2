"""From what is observed of a job and wanted for it to the plan that objects are built from, at home or in a member cluster."""

from streamrl_operator.planning import members, pods
from streamrl_operator.planning.objects.members import addresses, dialled
from streamrl_operator.planning.objects.shared import JobPlan, MemberPlace
from streamrl_operator.planning.values import DesiredRun, Observed, PlanningSettings


def plan_job(
    observed: Observed, wanted: DesiredRun, *, settings: PlanningSettings, place: MemberPlace | None = None
) -> JobPlan:
    """Return the plan for `place`; None: for home."""
    assert observed.job is not None, "objects are planned of a valid job"
    exposures = members.exposures(observed.job, observed.members)
    at = place.cluster if place else ""
    dials = None
    if (exposure := exposures.get(at)) is not None:
        # Where the exposure has no address now, generators go on dialling where they do: replicas and pods still follow.
        there = [each for each in observed.sets.values() if pods.cluster_of(each) == at]
        dials = addresses(exposure, observed.exposed) or dialled(there)
    return JobPlan(
        job=observed.job,
        namespace=observed.key[0],
        uid=observed.metadata["uid"],
        wanted=wanted,
        settings=settings,
        resolved=observed.resolved,
        defaults=observed.defaults,
        exposures=exposures,
        place=place,
        dials=dials,
    )
