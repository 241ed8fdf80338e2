"""The ranker `policyFeatures`: a ridge regression on hidden states of a frozen model, all layers merged.

    F_l(x)   pooled hidden states of layer l, standardised
    K        = sum over l of F_l F_l' / trace(F_l F_l')         every layer has one vote
    a        = (K + r I)^-1 y                                   y: log(1 + tokens) - mean
    score(x) = sum over l of F_l(x) F_l' a / trace(F_l F_l')

The policy itself knows best how much it will write: its own states of the prompt tell more than the text. r is the one of
`RIDGES` with the least leave-one-out error, which follows in closed form: a_i / ((K + r I)^-1)_ii.
The model is not copied: the folder names it, and holds the solution in `solution.safetensors`.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from streamrl.errors import UserError
from streamrl_workers.ranker.backbone import Backbone, load_backbone, pooled
from streamrl_workers.ranker.folders import FOLDER_FILE, SOLUTION_FILE

RIDGES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""In units of the mean eigenvalue of K."""
MAX_PAIRS = 8192
"""K then takes half a gigabyte."""


class PolicyFeatures:
    """A frozen model and one weight for each number of each layer."""

    def __init__(self, backbone: Backbone, *, model: str, solution: dict[str, Tensor], batch_prompts: int = 16) -> None:
        self._backbone = backbone
        self._model = model
        self._solution = solution
        self._batch_prompts = batch_prompts

    @classmethod
    def solved(
        cls, backbone: Backbone, *, model: str, prompts: Sequence[str], tokens: Sequence[float], batch_prompts: int
    ) -> "PolicyFeatures":
        """Solve for prompts with these mean tokens, at most `MAX_PAIRS`."""
        states_NLD = hidden_states(backbone, prompts, batch_prompts=batch_prompts)
        logs_N = torch.tensor([math.log1p(count) for count in tokens], dtype=torch.float64)
        return cls(
            backbone, model=model, solution=solve(states_NLD, logs_N - logs_N.mean()), batch_prompts=batch_prompts
        )

    def scores(self, prompts: Sequence[str]) -> list[float]:
        """Logarithm of the expected tokens, less the mean."""
        states_NLD = hidden_states(self._backbone, prompts, batch_prompts=self._batch_prompts)
        standard_NLD = (states_NLD - self._solution["mean"]) * self._solution["scale"]
        scores_N: list[float] = (standard_NLD * self._solution["weights"]).sum((1, 2)).tolist()
        return scores_N

    def save(self, path: Path) -> None:
        """The folder, which exists; `ranker.json` last."""
        save_file({name: tensor.contiguous() for name, tensor in self._solution.items()}, path / SOLUTION_FILE)
        model = str(Path(self._model).resolve()) if Path(self._model).is_dir() else self._model
        document = {"ranker": "policyFeatures", "model": model}
        (path / FOLDER_FILE).write_text(json.dumps(document) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path, *, field: str) -> "PolicyFeatures":
        """What `save` wrote. Raises `UserError`; `field` names the path."""
        try:
            model = str(json.loads((path / FOLDER_FILE).read_text(encoding="utf-8"))["model"])
            solution = load_file(path / SOLUTION_FILE)
        except Exception as error:
            line = str(error).strip().split("\n")[0]
            raise UserError(field=field, rule=f"cannot be read: {line}", got=str(path)) from error
        return cls(load_backbone(model, field=field), model=model, solution=solution)


@torch.inference_mode()
def hidden_states(backbone: Backbone, prompts: Sequence[str], *, batch_prompts: int) -> Tensor:
    """N prompts x L layers (the embeddings first) x D pooled numbers, float64."""
    parts: list[Tensor] = []
    for ids_BT, mask_BT in backbone.batches(prompts, size=batch_prompts):
        found = backbone.model(input_ids=ids_BT, attention_mask=mask_BT, output_hidden_states=True).hidden_states
        layers = [pooled(hidden_BTD, mask_BT) for hidden_BTD in found]
        parts.append(torch.stack(layers, dim=1).double().cpu())
    return torch.cat(parts)


def solve(states_NLD: Tensor, targets_N: Tensor) -> dict[str, Tensor]:
    """`weights`, `mean`, `scale`, each L x D: score(x) = sum of weights * (x - mean) * scale."""
    mean_LD, deviation_LD = states_NLD.mean(0), states_NLD.std(0, unbiased=False)
    constant_LD = deviation_LD < 1e-8  # noqa: PLR2004 - what never differs says nothing
    scale_LD = torch.where(constant_LD, torch.zeros_like(deviation_LD), 1.0 / deviation_LD.clamp(min=1e-8))
    standard_NLD = (states_NLD - mean_LD) * scale_LD
    trace_L = standard_NLD.square().sum((0, 2)).clamp(min=1.0)
    kernel_NN = torch.einsum("nld,mld,l->nm", standard_NLD, standard_NLD, 1.0 / trace_L)
    dual_N = _dual(kernel_NN, targets_N)
    weights_LD = torch.einsum("nld,n->ld", standard_NLD, dual_N) / trace_L[:, None]
    return {"weights": weights_LD, "mean": mean_LD, "scale": scale_LD}


def _dual(kernel_NN: Tensor, targets_N: Tensor) -> Tensor:
    """(K + r I)^-1 y for the r with the least leave-one-out error."""
    values_N, vectors_NN = torch.linalg.eigh(kernel_NN)
    values_N = values_N.clamp(min=0.0)
    rotated_N = vectors_NN.T @ targets_N
    best: tuple[float, Tensor] | None = None
    for ridge in RIDGES:
        inverse_N = 1.0 / (values_N + ridge * float(values_N.sum()) / len(values_N))
        dual_N = vectors_NN @ (inverse_N * rotated_N)
        error = float((dual_N / (vectors_NN.square() @ inverse_N)).square().mean())
        if best is None or error < best[0]:
            best = (error, dual_N)
    assert best is not None
    return best[1]
