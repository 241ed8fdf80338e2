"""The registry of rankers, and the folder of a fitted language model, looked at without torch: before a run starts.

    config.json, *.safetensors, a tokenizer      as `save_pretrained` writes them
    head.safetensors, ranker.json                written last

Owns the names of the files and the lines about what is missing. That the weights fit shows when they are loaded.
"""

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from streamrl.errors import UserError
from streamrl.spec.scheduling import RankerSpec

MODULE = "streamrl_workers.ranker"
"""What the scheduler starts."""
RANKERS = ("hashing", "languageModel")
"""As users write them."""
FIELD = "spec.scheduling.ranker.languageModel.path"
FOLDER_FILE = "ranker.json"
HEAD_FILE = "head.safetensors"
_FIX = "fit it again with `streamrl ranker fit`"


class RankerModel(Protocol):
    """A language model that ranks."""

    def scores(self, prompts: Sequence[str]) -> list[float]:
        """Higher = longer; what is no finite number says nothing."""

    def tuning(
        self, examples: Sequence[tuple[str, float]], *, passes: int, batch_prompts: int, seed: int
    ) -> Iterator[None]:
        """Learn (prompt, target); yields after each mini-batch, scores may be asked then."""

    def save(self, path: Path) -> None:
        """Write the folder, which exists."""


def model_class(*, field: str) -> Any:  # noqa: ANN401 - a class of a module that needs torch
    """`LanguageModel`. Raises `UserError` where its packages are not installed."""
    try:
        return importlib.import_module("streamrl_workers.ranker.language_model").LanguageModel
    except ModuleNotFoundError as error:
        rule = f"needs the package {error.name}, which is not installed"
        raise UserError(field=field, rule=rule, fix="install streamrl[worker]") from None


def check_folder(path: Path, *, field: str) -> None:
    """Refuse what `streamrl ranker fit` did not write. Raises `UserError`; `field` names the path in it."""
    if not path.is_dir():
        rule = "must be a folder that `streamrl ranker fit` wrote"
        raise UserError(field=field, rule=rule, got=str(path), fix=_FIX)
    for pattern in (FOLDER_FILE, "config.json", "*.safetensors", "tokenizer*", HEAD_FILE):
        if not [file for file in path.glob(pattern) if pattern == HEAD_FILE or file.name != HEAD_FILE]:
            raise UserError(field=field, rule=f"must hold {pattern}", got=str(path), fix=_FIX)


def check_ranker(choice: RankerSpec | None, *, base_dir: Path) -> None:
    """Refuse a folder that cannot be the one that a job names; relative paths begin at `base_dir`. Raises `UserError`."""
    if choice is not None and choice.language_model is not None:
        check_folder(base_dir / choice.language_model.path, field=FIELD)
