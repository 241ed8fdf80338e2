"""What must hold between the fields of a job: a file for each feature whose fields ask something of others."""

from streamrl.spec.base import FieldRule
from streamrl.spec.rules.agents import AGENT_RULES
from streamrl.spec.rules.algorithms import ALGORITHM_RULES
from streamrl.spec.rules.by_number import BY_NUMBER_RULES
from streamrl.spec.rules.devices import DEVICE_RULES
from streamrl.spec.rules.engines import ENGINE_RULES
from streamrl.spec.rules.frozen_model import FROZEN_MODEL_RULES
from streamrl.spec.rules.gang import GANG_RULES
from streamrl.spec.rules.sherl import SHERL_RULES
from streamrl.spec.rules.supervised import SUPERVISED_RULES

JOB_RULES: tuple[FieldRule, ...] = (
    *GANG_RULES,
    *AGENT_RULES,
    *DEVICE_RULES,
    *ENGINE_RULES,
    *SHERL_RULES,
    *ALGORITHM_RULES,
    *BY_NUMBER_RULES,
    *SUPERVISED_RULES,
    *FROZEN_MODEL_RULES,
)
"""Of every job, in the order in which they are told."""
