"""The initial model, which a divergence is measured from. Never trained, never in a checkpoint."""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from transformers import PreTrainedModel


class Reference(Protocol):
    """Gives the initial model for forward passes without gradient."""

    def initial(self) -> AbstractContextManager[PreTrainedModel]:
        """The model with its initial weights, while the context lasts."""


class FrozenCopy:
    """A second model in memory."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model.eval().requires_grad_(requires_grad=False)  # type: ignore[no-untyped-call] # transformers'

    def initial(self) -> AbstractContextManager[PreTrainedModel]:
        """The copy."""
        return nullcontext(self._model)
