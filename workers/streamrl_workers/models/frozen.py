"""Where a frozen model lies, and whether it can speak of a policy's tokens.

Owns: the teacher of `algorithm.distillation`, found alike by who makes models ready and by the trainer. Does not own loading (`load.py`),
nor what is done with its log-probs.
"""

from pathlib import Path

from streamrl.errors import UserError
from streamrl.spec import RLJobSpec
from streamrl.spec.model import FrozenModel
from streamrl_workers.models.load import download, load_config, load_tokenizer

TEACHER = "spec.algorithm.distillation.teacher"


def frozen_directory(model: FrozenModel, *, base_dir: Path, field: str, fetched: bool = True) -> str:
    """Its directory. `fetched`: a hub model is on this disk already, and the hub is not asked."""
    if model.hugging_face is not None:
        return str(download(model.hugging_face, field=f"{field}.huggingFace", fetched=fetched))
    assert model.path is not None
    directory = (base_dir / model.path.directory).resolve()
    if not directory.is_dir():
        raise UserError(
            field=f"{field}.path.directory",
            rule="must be a directory",
            got=model.path.directory,
            fix=f"there is none at {directory}",
        )
    return str(directory)


def path_in_pod(spec: RLJobSpec, *, model_path: str | None, base_dir: Path) -> str:
    """Of the teacher, or of the initial model: in a pod both lie on a volume of the pool's. `model_path`: of the initial one, where it is here."""
    teacher, model = spec.algorithm.teacher, spec.model
    if teacher is not None:
        return frozen_directory(teacher, base_dir=base_dir, field=TEACHER)
    if model_path is not None:
        return model_path
    if model.path is None or not Path(model.path.directory).is_absolute():
        raise UserError(
            field="spec.trainer.reference.pool",
            rule="needs a model of spec.model.path, in a directory that its pods have mounted",
            got=model.key,
            fix="put the model on a volume of the pool's pod, or leave trainer.reference out",
        )
    return model.path.directory


def check_same_tokens(frozen: str, *, policy: str, field: str) -> None:
    """Refuse a model for which the policy's token ids mean something else, or nothing."""
    ours, theirs = load_tokenizer(policy), load_tokenizer(frozen)
    mine, other = ours.get_vocab(), theirs.get_vocab()
    fix = "take a model of the same family"
    if differing := sorted(set(mine.items()) ^ set(other.items()), key=lambda pair: pair[1]):
        token, number = differing[0]
        rule = (
            f"must share the tokenizer of spec.model: {len(differing)} tokens differ, the first is {token!r} ({number})"
        )
        raise UserError(field=field, rule=rule, got=frozen, fix=fix)
    if ours.eos_token_id != theirs.eos_token_id:
        rule = f"must end by the same token as spec.model: {ours.eos_token!r}, its own is {theirs.eos_token!r}"
        raise UserError(field=field, rule=rule, got=frozen, fix=fix)
    rows, least = (load_config(path).get_text_config().vocab_size for path in (frozen, policy))
    if rows < least:
        rule = f"must know all {least} token ids of spec.model: it has {rows}"
        raise UserError(field=field, rule=rule, got=frozen, fix=fix)
