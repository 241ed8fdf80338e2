"""What a fitted ranker's folder must hold, looked at without torch: before a run starts, and where torch is not installed.

    ranker.json              {"ranker": key, ..}
    languageModel            config.json, *.safetensors, a tokenizer, head.safetensors
    policyFeatures           solution.safetensors; `model` in ranker.json names the policy, a folder or a name on the hub

Owns the names of the files and the lines about what is missing. That the weights fit the model shows when they are loaded.
"""

import json
import os
from pathlib import Path
from typing import Any

from streamrl.errors import UserError

FOLDER_FILE = "ranker.json"
HEAD_FILE = "head.safetensors"
SOLUTION_FILE = "solution.safetensors"
RANKERS = ("languageModel", "policyFeatures")
"""Those that have a folder."""
_HEADER_BYTES = 8
_MOST_HEADER_BYTES = 100 << 20
_FIX = "fit it again with `streamrl rank fit --ranker {}`"


def folder_document(path: Path) -> dict[str, Any]:
    """`ranker.json` of a folder; {} where there is none that can be read."""
    try:
        found = json.loads((path / FOLDER_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def check_folder(path: Path, *, ranker: str, field: str) -> None:
    """Refuse what is not a folder of this ranker. Raises `UserError`; `field` names the path in it."""
    fix = _FIX.format(ranker)
    if not path.is_dir():
        raise UserError(field=field, rule="must be a folder that `streamrl rank fit` wrote", got=str(path), fix=fix)
    document = folder_document(path)
    found = document.get("ranker")
    if found != ranker:
        rule = f"must be a folder of the ranker {ranker} ({FOLDER_FILE} names it)"
        raise UserError(field=field, rule=rule, got=found if isinstance(found, str) else str(path), fix=fix)
    if ranker == "policyFeatures":
        _check_tensors(path / SOLUTION_FILE, field=field, fix=fix)
        _check_policy(document.get("model"), field=field, fix=fix)
        return
    _check_tensors(path / HEAD_FILE, field=field, fix=fix)
    for pattern in ("config.json", "*.safetensors", "tokenizer*"):
        if not [file for file in path.glob(pattern) if file.name not in (HEAD_FILE, SOLUTION_FILE)]:
            raise UserError(field=field, rule=f"must hold {pattern}", got=str(path), fix=fix)


def _check_policy(model: object, *, field: str, fix: str) -> None:
    if not isinstance(model, str) or not model:
        raise UserError(field=field, rule=f"must name its model in {FOLDER_FILE}", got=model, fix=fix)
    if Path(model).is_absolute() and not (Path(model) / "config.json").is_file():
        raise UserError(field=field, rule="rests on a model that must be a folder with config.json", got=model, fix=fix)


def _check_tensors(path: Path, *, field: str, fix: str) -> None:
    """The header of a safetensors file: 8 bytes of length, then JSON that says how many bytes follow."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(_HEADER_BYTES), "little")
            header = json.loads(file.read(size)) if size <= _MOST_HEADER_BYTES else None
            whole = _HEADER_BYTES + size + max(entry["data_offsets"][1] for entry in _entries(header))
            if whole != os.fstat(file.fileno()).st_size:
                raise ValueError("it is cut off")  # noqa: TRY301 - one line for all that is wrong with it
    except OSError as error:
        raise UserError(field=field, rule=f"{path.name} cannot be read: {error.strerror}", fix=fix) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(field=field, rule=f"{path.name} is damaged: {error}", got=str(path), fix=fix) from None


def _entries(header: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - JSON
    return [entry for name, entry in header.items() if name != "__metadata__"]
