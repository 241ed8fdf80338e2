"""GPUs of a pod against what its processes compute on: what can never start is refused, here and by an API server.

Only NVIDIA's device plug-in says how many GPUs a container gets. Resources of other names and claims (DRA) are not judged.
"""

from streamrl.spec.base import FieldRule
from streamrl.spec.pod import Pod

GPU = "nvidia.com/gpu"
"""The resource of NVIDIA's device plug-in."""


def gpus(pod: Pod) -> int:
    """Count the GPUs that the main container gets; 0: none by `GPU`, or a claim may bring others."""
    amount = pod.resources.limits.get(GPU, "")
    return int(amount) if amount.isdecimal() and not pod.resource_claims else 0


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
