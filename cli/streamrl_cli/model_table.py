"""Table of model families (`models.json`, written by `tools/models.py`): what the product makes of each, and which row a configuration has.

Owns: finding a row from a configuration alone, its lines. Does not own: measuring it. Imports no torch.
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.errors import UserError
from streamrl.files import read_json
from streamrl.spec import RLJob

COLUMNS = {
    "trainer": "trainer: log-probs, gradient",
    "hf": "engine hf, before and after an update",
    "vllm": "engine vllm, before and after an update",
    "lora": "LoRA",
    "ranks": "two ranks against one",
    "export": "export loads again",
    "longest": "lengths without an L x L mask",
}
"""Columns in their order, by the names that `models.json` uses."""
NOT_RUN = "not run"
_TABLE = Path(__file__).with_name("models.json")
PROBED = "is not in the table of models; each generator proves it at its first load, or ends with a line"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What of a configuration decides its row."""

    model_type: str
    window: bool
    longrope: bool

    def __str__(self) -> str:
        traits = [name for name, has in (("a sliding window", self.window), ("longrope", self.longrope)) if has]
        return " with ".join([repr(self.model_type), *([" and ".join(traits)] if traits else [])])


def shape_of(config: Mapping[str, Any]) -> Shape:
    """Return the shape of a configuration as `config.json` has it."""
    text = config if not isinstance(config.get("text_config"), dict) else config["text_config"]
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind = (rope.get("rope_type") or rope.get("type")) if isinstance(rope, dict) else None
    return Shape(
        model_type=str(config.get("model_type")),
        window=bool(text.get("sliding_window")) and text.get("use_sliding_window", True) is not False,
        longrope=kind == "longrope",
    )


@functools.cache
def table() -> dict[str, Any]:
    """Return the whole table: versions, date, families."""
    found: dict[str, Any] = read_json(_TABLE)
    return found


def families_of(shape: Shape) -> list[str]:
    """Return the rows of a shape; there may be several, as with tied embeddings."""
    return [name for name, row in table()["families"].items() if Shape(**row["shape"]) == shape]


def folder_shape(folder: Path) -> Shape:
    """Return the shape of the model in a folder. Raises UserError without a configuration."""
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise UserError(field=str(folder / "config.json"), rule="must be a mapping", fix="save it with save_pretrained")
    return shape_of(config)


def row_lines(name: str) -> Iterator[str]:
    """Yield a row as lines."""
    row = table()["families"][name]
    yield f"{name} (model_type {row['shape']['model_type']})"
    for column, title in COLUMNS.items():
        yield f"  {title + ':':<41} {row['cells'].get(column, {}).get('text', NOT_RUN)}"


def job_warnings(job: RLJob, *, base_dir: Path) -> Iterator[str]:
    """Yield what the table says against the model of a job: a family without a row, a column that the job needs and that is refused."""
    path = job.spec.model.path if job.spec.has_model else None
    if path is None or not (base_dir / path.directory / "config.json").is_file():
        return
    shape = folder_shape(base_dir / path.directory)
    found = families_of(shape)
    if not found:
        yield f"spec.model.path.directory: {shape} {PROBED}"
        return
    needed = {"trainer", *(pool.engine.key for pool in job.spec.generators)}
    needed |= {"lora"} if job.spec.trainer.lora is not None and not job.spec.trainer.lora.target_modules else set()
    for column in (one for one in COLUMNS if one in needed):
        cells = [table()["families"][name]["cells"].get(column, {}) for name in found]
        if all(cell.get("state") == "refused" for cell in cells):
            yield f"spec.model.path.directory: {column} refuses {shape}: {cells[0]['text']}"
