"""Jobs that learn from rows, without generators, and the model and the rows that they begin with."""

import json
from pathlib import Path
from typing import Any

from streamrl.spec.model import ScratchModel
from streamrl_workers.models.scratch import build_model, build_tokenizer

ROWS = 40
HELD_OUT = 4
TRAINED = ROWS - HELD_OUT
BATCH = 6
PASSES = 2
STEPS = PASSES * TRAINED // BATCH


def supervised_job(**algorithm: Any) -> dict[str, Any]:
    """Two passes over all rows of `write_rows`, in order: weights follow from the job alone."""
    return {
        "apiVersion": "streamrl.io/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "rows"},
        "spec": {
            "model": {"path": {"directory": "model"}},
            "task": {
                "dataset": {"jsonl": {"path": "rows.jsonl", "answerField": "completion"}},
                "groupSize": 1,
                "sampling": {"maxTokens": 16},
                "evaluation": {"maxPrompts": HELD_OUT, "intervalSteps": 4},
            },
            "algorithm": {"supervised": algorithm},
            "pipeline": {"mode": "StreamSync", "delivery": "Logical", "batchGroups": BATCH, "steps": STEPS},
            "generators": [],
            "trainer": {"learningRate": 0.01, "microBatchTokens": 64},
            "storage": {"checkpoints": {"intervalSteps": 3}},
            "failurePolicy": {"maxRestarts": 100},
        },
    }


def write_rows(folder: Path, *, changed: dict[int, dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    """Sums and their results, odd ones with a reward of 1; `changed`: fields of some rows, None is none."""
    rows = [{"prompt": f"{n}+{n}=", "completion": f"{2 * n}", "reward": float(n % 2)} for n in range(ROWS)]
    for number, fields in (changed or {}).items():
        rows[number] = {key: value for key, value in (rows[number] | fields).items() if value is not None}
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def write_model(folder: Path) -> None:
    """A small model with random weights, as `save_pretrained` leaves it."""
    spec = ScratchModel.model_validate(
        {"hiddenSize": 32, "layers": 1, "heads": 2, "intermediateSize": 64, "maxPositions": 32}
    )
    tokenizer = build_tokenizer(set("0123456789+="), max_positions=spec.max_positions)
    build_model(spec, tokenizer=tokenizer, seed=0).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def write_turns(folder: Path) -> None:
    """Ten prompts with four answers each of two turns, of which the second is behind a new prompt; answer n earned n."""
    segments = [{"tokens": 2, "reward": 0.5}, {"tokens": 2, "observation": True, "context": True}, {"tokens": 1}]
    rows = [
        {
            "prompt": f"{prompt}+",
            "prompt_tokens": [3 + prompt, 13],
            "tokens": [4 + answer, 5, 6, 7, 4 + answer],
            "segments": segments,
            "reward": answer,
        }
        for prompt in range(10)
        for answer in range(4)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
