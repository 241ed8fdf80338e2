"""Brings a model of the hub onto this machine: the only door to huggingface_hub.

Invariant: the directory holds exactly the revision asked for, so trainer and generators read the same files.
"""

from pathlib import Path

from huggingface_hub import snapshot_download

from streamrl.errors import UserError, shorten
from streamrl.spec.model import HuggingFaceModel

_PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
"""Config, weights and tokenizer; no pickles, no code, no duplicates in other formats."""


def download(model: HuggingFaceModel) -> Path:
    """Fetch what is not there yet. Raises `UserError` if the hub or the revision cannot be had."""
    try:
        return Path(snapshot_download(model.name, revision=model.revision, allow_patterns=list(_PATTERNS)))
    except (OSError, ValueError) as error:  # also what huggingface_hub and its HTTP client raise
        lines = str(error).splitlines() or [type(error).__name__]
        raise UserError(
            field="spec.model.huggingFace",
            rule=f"cannot be fetched: {shorten(lines[0])}",
            got=f"{model.name}@{model.revision}",
            fix="check name, revision and network, or use spec.model.path",
        ) from error
