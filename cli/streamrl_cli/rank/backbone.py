"""The backbone of rankers with a model, as the command line loads it: what it cannot load is a mistake in `--model`."""

from streamrl_workers.ranker import backbone
from streamrl_workers.ranker.backbone import Backbone, pooled

__all__ = ["Backbone", "load_backbone", "pooled"]


def load_backbone(path: str) -> Backbone:
    """See `streamrl_workers.ranker.backbone`. Raises `UserError`."""
    return backbone.load_backbone(path, field="--model")
