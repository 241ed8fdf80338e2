"""Rules of jobs by what their engines can."""

from streamrl.spec.base import FieldRule
from streamrl.spec.generators import GeneratorEngine
from streamrl.spec.training import TrainerEngine

_WITHOUT_MODEL = GeneratorEngine.those(lambda engine: not engine.needs_model)
_CUT = GeneratorEngine.those(lambda engine: not engine.whole_logprobs)
_TRAINERS_WITHOUT_MODEL = TrainerEngine.those(lambda engine: not engine.needs_model)

ENGINE_RULES = (
    FieldRule(
        f"engine {_WITHOUT_MODEL} must be used by all generators and the trainer, or by none",
        f"self.generators.all(g, {_WITHOUT_MODEL.cel('g.engine')} == "
        f"{_TRAINERS_WITHOUT_MODEL.cel('self.trainer.engine')})",
    ),
    FieldRule(
        f"engine {_CUT} needs task.sampling with topP 1 and without topK: its log-probs are those behind them",
        f"!self.generators.exists(g, {_CUT.cel('g.engine')}) || "
        "(self.task.sampling.topP == 1.0 && !has(self.task.sampling.topK))",
        "topP {self.task.sampling.top_p:g}, topK {self.task.sampling.top_k}",
    ),
)
"""What goes with an engine that has no model, or no log-probs of filtered tokens."""
