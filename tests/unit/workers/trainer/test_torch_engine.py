"""The torch engine on a tiny model: metrics, checkpoints, export. Losses and gradients: `test_algorithms.py`."""

import math
from collections.abc import Sequence

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from streamrl.errors import UserError
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.models.published import as_tensor
from streamrl_workers.stream.packing import unpack_int32
from streamrl_workers.trainer.engines.torch_engine import TorchEngine
from streamrl_workers.weights.hashing import tensors_hash
from support.tiny_trainer import VOCABULARY, engine_on, tiny_engine, tiny_model, tiny_worker
from support.trainer_groups import make_group, trainer_spec


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def _groups() -> list[pb.Group]:
    return [
        make_group(1),
        make_group(2, rewards=[1.0, None, 0.0]),
        make_group(3, rewards=[1.0, 1.0, 1.0]),  # nothing to learn
        make_group(4, rewards=[0.2, 0.9]),
    ]


def _whole_step(engine: TorchEngine, groups: Sequence[pb.Group], *, step: int = 0) -> dict[str, float]:
    engine.begin_step(step, attempt=1)
    engine.add(groups)
    return engine.finish_step()


def _reference_logprobs(model: torch.nn.Module, trajectory: pb.Sample) -> list[float]:
    """One sequence at a time, no padding, float64."""
    prompt, tokens = unpack_int32(trajectory.prompt_tokens), unpack_int32(trajectory.tokens)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0]
    logprobs = torch.log_softmax(logits, -1)
    return [float(logprobs[len(prompt) + place - 1, token]) for place, token in enumerate(tokens)]


def test_metrics_of_samples_that_were_drawn_by_the_very_policy():
    """A second engine's log-probs stand for the generator's: every ratio is 1."""
    model, groups = tiny_model().eval(), [make_group(1), make_group(3, rewards=[1.0, 1.0])]
    for trajectory in (t for group in groups for t in group.samples):
        logprobs = _reference_logprobs(model, trajectory)
        trajectory.logprobs = torch.tensor(logprobs).numpy().tobytes()
    metrics = _whole_step(tiny_engine(trainer_spec()), groups)
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["train_infer_logprob_diff_mean"] < 1e-4
    assert metrics["behaviour_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["clip_fraction"] == 0.0
    assert 0.0 < metrics["entropy"] < math.log(VOCABULARY)
    assert metrics["skipped_tokens"] + metrics["forward_tokens"] == metrics["tokens"]
    assert metrics["zero_variance_groups"] == 1
    assert metrics["gradient_norm"] > 0
    assert metrics["skipped_nonfinite_steps"] == 0


def test_a_step_with_nothing_to_learn_has_a_gradient_of_zero():
    metrics = _whole_step(
        tiny_engine(trainer_spec()), [make_group(1, rewards=[1.0, 1.0]), make_group(2, rewards=[None, None])]
    )
    assert (metrics["gradient_norm"], metrics["loss"], metrics["forward_tokens"]) == (0.0, 0.0, 0.0)


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted():
    engine, group = tiny_engine(trainer_spec()), make_group(1)
    before = tensors_hash(engine.tensors())
    group.samples[0].logprobs = torch.full((len(group.samples[0].tokens) // 4,), math.nan).numpy().tobytes()
    assert _whole_step(engine, [group])["skipped_nonfinite_steps"] == 1.0
    assert tensors_hash(engine.tensors()) == before


@pytest.mark.parametrize(
    "job",
    [
        {"schedule": "Cosine", "warmUpSteps": 1},
        {"rule": "ppo", "algorithm": {"miniBatches": 2}},
        {"rule": "ppo", "optimizer": "Muon", "schedule": "Linear"},
    ],
)
def test_training_resumes_bit_for_bit(tmp_path, job):
    spec = trainer_spec(**job)
    through, resumed = tiny_engine(spec), tiny_engine(spec, seed=9)
    for step in range(2):
        _whole_step(through, _groups(), step=step)
    through.save(tmp_path).result()
    resumed.load(tmp_path)
    assert tensors_hash(resumed.tensors()) == tensors_hash(through.tensors())
    for step in (2, 3):
        assert _whole_step(through, _groups(), step=step) == _whole_step(resumed, _groups(), step=step)
    assert tensors_hash(resumed.tensors()) == tensors_hash(through.tensors())


def test_a_step_that_is_begun_again_forgets_what_it_had():
    once, again = tiny_engine(trainer_spec()), tiny_engine(trainer_spec(microBatchTokens=16))
    again.begin_step(0, attempt=1)
    again.add([make_group(7)])
    assert again.advance(idle=False)
    again.add([make_group(8)])
    assert _whole_step(again, _groups()) == pytest.approx(_whole_step(once, _groups()), rel=1e-4, abs=1e-6)


def test_a_checkpoint_of_another_model_is_the_users_error(tmp_path):
    engine = tiny_engine(trainer_spec())
    _whole_step(engine, _groups())
    engine.save(tmp_path).result()
    with pytest.raises(UserError, match="does not fit this model"):
        tiny_engine(trainer_spec(), hidden_size=32).load(tmp_path)


@pytest.mark.parametrize(("wrote", "reads"), [("AdamW", "Muon"), ("Muon", "AdamW")])
def test_a_checkpoint_of_another_optimizer_is_refused_by_its_name(tmp_path, wrote, reads):
    tiny_engine(trainer_spec(optimizer=wrote)).save(tmp_path).result()
    with pytest.raises(UserError) as refused:
        tiny_engine(trainer_spec(optimizer=reads)).load(tmp_path)
    told = str(refused.value)
    assert told.startswith(f"spec.trainer.optimizer: must be {wrote}, whose state is in the checkpoint {tmp_path}")
    assert f"got '{reads}'" in told


def test_muon_moves_matrices_of_blocks_as_torchs_own_and_the_rest_as_adamw():
    """The first update of each tensor by its gradient, both taken from the engine that has AdamW."""
    before, trained, gradients = {}, {}, {}
    for optimizer in ("AdamW", "Muon"):
        spec = trainer_spec(optimizer=optimizer, weightDecay=0.1)
        engine = engine_on(worker := tiny_worker(spec), spec=spec)
        before = {name: as_tensor(tensor).clone() for name, tensor in engine.tensors().items()}
        _whole_step(engine, _groups())
        gradients = worker.gradients()
        trained[optimizer] = {name: as_tensor(tensor) for name, tensor in engine.tensors().items()}
    matrices = {name for name, tensor in before.items() if ".layers." in name and tensor.ndim == 2}
    assert len(matrices) == 2 * 7
    for name, tensor in before.items():
        expected = trained["AdamW"][name]
        if name in matrices:
            expected = torch.nn.Parameter(tensor)
            expected.grad = gradients[name]
            torch.optim.Muon([expected], lr=1e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw").step()
        torch.testing.assert_close(trained["Muon"][name], expected.detach(), rtol=1e-6, atol=1e-7)


def test_published_tensors_are_copies_with_tied_names_once():
    engine = tiny_engine(trainer_spec())
    tensors = engine.tensors()
    assert "lm_head.weight" not in tensors
    assert tensors["model.embed_tokens.weight"].shape == (VOCABULARY, 16)
    before = bytes(tensors["model.embed_tokens.weight"].data)
    _whole_step(engine, _groups())
    assert bytes(tensors["model.embed_tokens.weight"].data) == before
    assert bytes(engine.tensors()["model.embed_tokens.weight"].data) != before


def test_an_export_changes_nothing(tmp_path):
    """A model that attends by documents still does."""
    engine = tiny_engine(trainer_spec())
    before = engine.held_out_loss(_groups()[0].samples)
    engine.export(tmp_path)
    assert engine.held_out_loss(_groups()[0].samples) == before


def test_the_export_loads(tmp_path):
    engine = tiny_engine(trainer_spec())
    _whole_step(engine, _groups())
    engine.export(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    embedding = model.get_input_embeddings().weight.detach()
    assert embedding.numpy().tobytes() == bytes(engine.tensors()["model.embed_tokens.weight"].data)
    assert AutoTokenizer.from_pretrained(tmp_path).vocab_size == VOCABULARY
