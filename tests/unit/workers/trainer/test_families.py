"""Log-probs and gradients of today's model families against plain transformers, each token from its own prefix alone."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from streamrl.errors import UserError
from streamrl_workers.models.documents import takes_documents
from streamrl_workers.trainer.engines.forward import Forward, make_batch
from streamrl_workers.trainer.engines.torch_engine import build_models
from streamrl_workers.trainer.engines.worker import RankWorker
from support.model_families import FAMILIES, LONGROPE, save_tiny
from support.prefix_logprobs import gradients_of, random_samples, samples_logprobs
from support.trainer_groups import trainer_spec
from support.vllm_models import CHARS, tokenizer

CPU = torch.device("cpu")
TEMPERATURE = 0.7
LENGTHS = ((9, 11), (6, 21), (12, 50))
"""Tokens of prompt and completion: within a window of 16 and beyond it, short of the switch of LongRoPE at 32 and across it."""


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_gradients_are_those_of_each_prefix(family: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    save_tiny(family, tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    spec = trainer_spec(temperature=TEMPERATURE)
    models = build_models(spec, model_path=str(tmp_path), device=CPU)
    samples = random_samples(LENGTHS, vocabulary=len(CHARS))
    batch = RankWorker(models, spec=spec)._batch(samples)
    expected_N = samples_logprobs(plain, samples, temperature=TEMPERATURE)
    found_N = Forward(models.model, temperature=TEMPERATURE).logprobs(batch)
    near = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(found_N, expected_N, **near)
    models.model.zero_grad()
    expected, found = gradients_of(plain, expected_N), gradients_of(models.model, found_N)
    assert found.keys() == expected.keys()
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name] / scale, gradient / scale, **near, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_of_documents_is_the_padded_rows_and_each_sample_alone(family: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    save_tiny(family, tmp_path)
    samples = [*random_samples(LENGTHS, vocabulary=len(CHARS)), *random_samples(LENGTHS, vocabulary=len(CHARS))[::-1]]
    found = {}
    for layout in ("Packed", "Padded"):
        spec = trainer_spec(temperature=TEMPERATURE, microBatchLayout=layout)
        worker = RankWorker(build_models(spec, model_path=str(tmp_path), device=CPU), spec=spec)
        forward = Forward(worker._model, temperature=TEMPERATURE)
        cuts = {"together": [samples], "alone": [[one] for one in samples]} if layout == "Packed" else {"": [samples]}
        for cut, parts in cuts.items():
            worker._model.zero_grad()
            batches = [worker._batch(part) for part in parts]
            assert all((len(batch.inputs_BL) == 1) == (layout == "Packed") for batch in batches)
            logprobs_N = torch.cat([forward.logprobs(batch) for batch in batches])
            found[layout + cut] = logprobs_N.detach(), gradients_of(worker._model, logprobs_N)
    expected_N, expected = found.pop("Padded")
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    near = {"rtol": 1e-5, "atol": 1e-5}
    for logprobs_N, gradients in found.values():
        torch.testing.assert_close(logprobs_N, expected_N, **near)
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name] / scale, gradient / scale, **near)


def test_an_export_leaves_the_trainer_as_it_was(tmp_path: Path) -> None:
    """Each sample of a row still sees itself alone."""
    save_tiny("qwen3", tmp_path)
    spec = trainer_spec()
    worker = RankWorker(build_models(spec, model_path=str(tmp_path), device=CPU), spec=spec)
    before = worker.prepare(random_samples(LENGTHS, vocabulary=len(CHARS)))
    worker.export(str(tmp_path / "export"))
    assert worker.prepare(random_samples(LENGTHS, vocabulary=len(CHARS))) == before


def test_models_that_carry_state_or_number_tokens_themselves_are_padded(tmp_path: Path) -> None:
    """A convolution sees the document before; Nemotron does not pass documents on; BART's decoder numbers the row."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    bart = {"vocab_size": 32, "d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}
    configs = {
        "lfm2": {**sizes, "num_key_value_heads": 2, "intermediate_size": 16, "layer_types": ["conv", "full_attention"]},
        "nemotron": {**sizes, "num_key_value_heads": 2, "intermediate_size": 16},
        "bart": {**bart, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "is_decoder": True},
    }
    for family, config in configs.items():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config))
        assert not takes_documents(model), family
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"^spec.trainer.microBatchLayout: must be Auto or Padded for .*, got 'Packed'"):
        build_models(trainer_spec(microBatchLayout="Packed"), model_path=str(tmp_path), device=CPU)


def test_a_model_without_attention_is_trained(tmp_path: Path) -> None:
    config = AutoConfig.for_model("mamba", vocab_size=len(CHARS), hidden_size=16, num_hidden_layers=2, state_size=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    spec = trainer_spec()
    worker = RankWorker(build_models(spec, model_path=str(tmp_path), device=CPU), spec=spec)
    assert not worker.layout(None).packed
    samples = random_samples(LENGTHS, vocabulary=len(CHARS))
    for one, beside in zip(samples, worker.prepare(samples), strict=True):
        (alone,) = worker.prepare([one])
        assert list(beside["proximal_N"]) == pytest.approx(list(alone["proximal_N"]), abs=1e-5)


def test_a_sample_has_the_same_logprobs_beside_a_longer_one(tmp_path: Path) -> None:
    save_tiny(LONGROPE, tmp_path)
    spec = trainer_spec()
    worker = RankWorker(build_models(spec, model_path=str(tmp_path), device=CPU), spec=spec)
    samples = random_samples(LENGTHS, vocabulary=len(CHARS))
    together = [prepared["proximal_N"] for prepared in worker.prepare(samples)]
    for sample, found in zip(samples, together, strict=True):
        (alone,) = worker.prepare([sample])
        torch.testing.assert_close(torch.tensor(found), torch.tensor(alone["proximal_N"]), rtol=1e-5, atol=1e-5)


def test_no_mask_is_built_for_padding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(LONGROPE, tmp_path)
    spec = trainer_spec()
    worker = RankWorker(build_models(spec, model_path=str(tmp_path), device=CPU), spec=spec)
    masks: list[object] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def watched(*args: object, attn_mask: object = None, **kwargs: object) -> torch.Tensor:
        masks.append(attn_mask)
        return attend(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    worker.prepare(random_samples(LENGTHS, vocabulary=len(CHARS)))
    assert set(masks) == {None}


def test_a_critic_of_utterances_and_longrope_are_refused_together(tmp_path: Path) -> None:
    save_tiny(LONGROPE, tmp_path)
    with pytest.raises(UserError, match="one set of rotary factors"):
        build_models(trainer_spec(rule="archer"), model_path=str(tmp_path), device=CPU)


def test_padding_counts_for_no_row(tmp_path: Path) -> None:
    samples = random_samples(LENGTHS, vocabulary=len(CHARS))
    batch = make_batch(samples, aggregation="TokenMean", device=CPU, switch=32)
    assert batch.positions_BL is not None
    assert batch.positions_BL.amax(-1).tolist() == [18, 25, 31, 60]
    assert len(batch.targets_N) == sum(completion for _, completion in LENGTHS)
