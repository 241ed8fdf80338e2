"""GPUs of a pod against what its processes compute on: what can never start is refused, here and by an API server.

Only NVIDIA's device plug-in says how many GPUs a container gets. Resources of other names are compared in warnings (`spec_warnings.py`),
claims (DRA) nowhere.
"""

from collections.abc import Mapping

from streamrl.spec.base import FieldRule
from streamrl.spec.pod import Pod

GPU = "nvidia.com/gpu"
"""The resource of NVIDIA's device plug-in."""


def gpus(pod: Pod) -> int:
    """Count the GPUs that the main container gets; 0: none by `GPU`, or a claim may bring others."""
    amount = pod.resources.limits.get(GPU, "")
    return int(amount) if amount.isdecimal() and not pod.resource_claims else 0


def gpus_of_any_maker(amounts: Mapping[str, str]) -> int:
    """Count the GPUs among the amounts of a container: resources of device plug-ins such as nvidia.com/gpu and amd.com/gpu."""
    return sum(int(amount) for name, amount in amounts.items() if names_gpus(name) and amount.isdecimal())


def names_gpus(resource: str) -> bool:
    """Return whether the resource is of a device plug-in for GPUs."""
    return "/" in resource and resource.rpartition("/")[2].startswith("gpu")


def enough_gpus(*, field: str, why: str, others: str, number: str, got: str) -> FieldRule:
    """Return the rule that a pod has a GPU for each of `field`.

    Args:
        field: the number, in the message.
        why: each needs a GPU of the same pod.
        others: CEL that is true where the rule does not apply.
        number: the same, in CEL.
        got: what is got, as in `FieldRule`.
    """
    limits = "self.pod.resources.limits"
    given = f"int({limits}['{GPU}'])"
    return FieldRule(
        f"{field} must be at most {GPU} of pod.resources.limits: {why}",
        f"{others} || !has(self.pod) || (has(self.pod.resourceClaims) && self.pod.resourceClaims.size() > 0) || "
        f"!has(self.pod.resources) || !has({limits}) || !('{GPU}' in {limits}) || "
        f"{given} == 0 || {given} >= {number}",
        got,
    )
