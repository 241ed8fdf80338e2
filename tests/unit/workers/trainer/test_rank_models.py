"""The models of one rank: bfloat16 where the hardware has it, activation checkpointing, adapters."""

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Qwen2Config

from streamrl.errors import UserError
from streamrl.spec.generators import HfEngineSpec
from streamrl.spec.training import Lora
from streamrl_workers.generator.engines import create_hf
from streamrl_workers.generator.engines.base import EngineOptions
from streamrl_workers.generator.engines.hf.adapters import AdaptedParameters
from streamrl_workers.models.load import load_empty, load_model, load_structure, load_tokenizer
from streamrl_workers.models.logprobs import answer_logprobs
from streamrl_workers.models.lora import add_adapters
from streamrl_workers.models.published import as_bytes, as_tensor, merged, split
from streamrl_workers.trainer.engines import model_files, sharding
from streamrl_workers.trainer.engines.forward import Forward, UtteranceValueModel, make_batch
from streamrl_workers.trainer.engines.packing import pack_sample
from streamrl_workers.trainer.engines.setup import EngineSetup
from streamrl_workers.trainer.engines.torch_engine import TorchEngine, build_models, create
from streamrl_workers.trainer.engines.worker import RankWorker
from streamrl_workers.weights.hashing import SliceBytes
from support.tiny_folder import tiny_folder
from support.trainer_groups import make_group, trainer_spec

CPU = torch.device("cpu")
HAS_BF16 = any(word in Path("/proc/cpuinfo").read_text().split() for word in ("avx512_bf16", "amx_bf16", "bf16"))
KL = {"referenceKl": {"coefficient": 0.1}}
SHERL = {"lateLayers": 1, "width": 4}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models") / "model")


def _engine(model: Path, **job: Any) -> TorchEngine:
    return create(EngineSetup(spec=trainer_spec(**job), model_path=str(model), threads=1))


def _worker(model: Path, **job: Any) -> RankWorker:
    spec = trainer_spec(**job)
    return RankWorker(build_models(spec, model_path=str(model), device=CPU), spec=spec)


def _step(engine: TorchEngine, step: int = 0) -> dict[str, float]:
    engine.begin_step(step, attempt=1)
    engine.add([make_group(number) for number in range(3)])
    return engine.finish_step()


def _slices(engine: TorchEngine) -> dict[str, SliceBytes]:
    return {one.name: one for one in engine.slices(attempt=1, step=0)}


def _batch() -> Any:
    samples = [one for t in make_group(1).samples for one in pack_sample(t, step=0, attempt=1, advantage=1.0)]
    return make_batch(samples, aggregation="TokenMean", device=CPU)


def test_activation_checkpointing_gives_the_same_gradients(model: Path) -> None:
    samples = [one for t in make_group(1).samples for one in pack_sample(t, step=0, attempt=1, advantage=1.0)]
    plain, thrifty = _worker(model), _worker(model, activationCheckpointing=True)
    saved: list[int] = []
    for worker in (plain, thrifty):
        kept = 0

        def count(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            kept += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            worker.accumulate(samples)
        saved.append(kept)
    assert saved[1] < saved[0] / 2  # or nothing was saved at all
    gradients = thrifty.gradients()
    for name, gradient in plain.gradients().items():
        assert gradient.norm() > 0, name
        torch.testing.assert_close(gradients[name], gradient)


@pytest.fixture
def _left() -> Iterator[None]:
    """A rank with CPU offload, or in bfloat16, is a process group of one."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_left")
@pytest.mark.parametrize(
    "job",
    [
        {"rule": "ppo", "microBatchTokens": 32},
        {"rule": "archer"},
        {"lora": {"rank": 4}, "algorithm": KL},
        {"rule": "ppo", "sherl": SHERL},
    ],
    ids=["ppo", "archer", "lora", "sherl"],
)
def test_with_cpu_offload_a_rank_alone_trains_alike(model: Path, tmp_path: Path, job: dict[str, Any]) -> None:
    plain, offloaded = _engine(model, **job), _engine(model, cpuOffload=True, **job)
    for step in range(3):
        assert _step(offloaded, step) == pytest.approx(_step(plain, step), rel=1e-4, abs=1e-6)
    offloaded.save(tmp_path).result()
    plain.load(tmp_path)  # what one wrote the other reads
    assert plain.tensors() == offloaded.tensors()
    assert _step(plain, 3) == pytest.approx(_step(offloaded, 3), rel=1e-4, abs=1e-6)
    theirs = offloaded.tensors()
    for name, published in plain.tensors().items():
        torch.testing.assert_close(as_tensor(published), as_tensor(theirs[name]), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("_left")
def test_a_pass_gathers_a_block_and_no_copy_that_it_does_not_use(model: Path) -> None:
    spec = trainer_spec(rule="archer", cpuOffload=True)
    critic = build_models(spec, model_path=str(model), device=CPU, mesh=sharding.mesh_of_one(CPU)).critic
    assert isinstance(critic, UtteranceValueModel)
    gathered: list[set[str]] = []

    def look(*_: Any) -> None:
        gathered.append({name for name, p in critic.named_parameters() if not isinstance(p, DTensor)})

    for body in (critic.body, critic.target.body):
        body.get_submodule("layers.0.mlp").register_forward_pre_hook(look)
    with torch.no_grad():
        for target in (False, True):
            critic(_batch().inputs_BL, target=target)
    root = {name for name in gathered[0] if ".layers." not in name}
    block = {name for name in gathered[0] - root if name.startswith("body.layers.0.")}
    assert gathered[0] == root | block
    assert {"head.weight", "body.embed_tokens.weight"} <= root
    assert gathered[1] == root | {f"target.{name}" for name in gathered[0]}


def test_without_a_compiler_compile_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError) as refused:
        build_models(trainer_spec(compile=True), model_path=str(model), device=CPU)
    (line,) = refused.value.lines
    assert line.startswith("spec.trainer.compile: must be false where a C++ compiler is missing")


@pytest.mark.parametrize(("hidden", "missing"), [("triton", "the package triton"), ("gcc", "a C compiler")])
def test_a_gpu_needs_triton_and_a_compiler(monkeypatch: pytest.MonkeyPatch, hidden: str, missing: str) -> None:
    found = None if hidden == "triton" else object()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match=rf"^spec.trainer.compile: must be false where {missing} is missing"):
        sharding.check_compiler(torch.device("cuda"))


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_model_that_waits_for_its_weights_takes_no_memory(tmp_path: Path) -> None:
    config = Qwen2Config(vocab_size=65_536, hidden_size=1024, intermediate_size=64, num_hidden_layers=1)
    config.tie_word_embeddings = True
    config.save_pretrained(tmp_path)
    load_structure(str(tmp_path)).state_dict()  # whatever else is loaded the first time
    before = _resident_bytes()
    model = load_empty(str(tmp_path))
    assert _resident_bytes() - before < 64 * 2**20 < 256 * 2**20 <= 4 * model.num_parameters()
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_hardware_is_asked_for_bfloat16() -> None:
    assert sharding.has_bf16(CPU) == HAS_BF16


@pytest.mark.usefixtures("_left")
def test_bf16_trains_in_bfloat16_or_is_refused(model: Path) -> None:
    if not HAS_BF16:
        with pytest.raises(UserError, match=r"^spec.trainer.precision: must be FP32 on hardware without"):
            _engine(model, precision="BF16")
        return
    unclipped = {  # rounding moves tokens over a clip's edge
        "algorithm": {"clipLow": 0.99, "clipHigh": 10.0},
        "correction": {"twoSidedClip": {"cap": 1000}},
    }
    engine, exact = _engine(model, precision="BF16", **unclipped), _engine(model, **unclipped)
    measured, expected = _step(engine), _step(exact)
    assert measured["loss"] == pytest.approx(expected["loss"], rel=0.05, abs=0.05)
    assert measured["loss"] != expected["loss"]
    assert measured["gradient_norm"] == pytest.approx(expected["gradient_norm"], rel=0.2)
    assert {tensor.dtype for tensor in engine.tensors().values()} == {"bfloat16"}
    gradients = _worker(model, precision="BF16").gradients()
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}

    between: set[torch.dtype] = set()
    policy = build_models(trainer_spec(precision="BF16"), model_path=str(model), device=CPU).model
    policy.get_submodule("model.layers.1").register_forward_pre_hook(lambda _, args: between.add(args[0].dtype))
    Forward(policy, temperature=1.0).logprobs(_batch())
    assert between == {torch.bfloat16}  # what goes from block to block, too


@pytest.mark.parametrize(("precision", "lacking"), [("BF16", "bfloat16"), ("TF32", "TF32")])
def test_hardware_without_the_format_is_refused(
    monkeypatch: pytest.MonkeyPatch, model: Path, precision: str, lacking: str
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_bf16": False})
    with pytest.raises(UserError, match=f"^spec.trainer.precision: must be FP32 on hardware without {lacking}"):
        build_models(trainer_spec(precision=precision), model_path=str(model), device=CPU)


def test_generators_take_what_a_bf16_trainer_publishes(model: Path) -> None:
    published = model_files.tensors(load_model(str(model)), precision="BF16")
    generator = create_hf(EngineOptions(spec=HfEngineSpec(slots=2), model_path=str(model), threads=1, precision="BF16"))
    generator.load_weights(version=0, tensors=published)


def test_what_is_exported_is_what_generators_merge(model: Path, tmp_path: Path) -> None:
    engine, initial = _engine(model, lora={"rank": 4}), load_model(str(model))
    losses = [_step(engine, step)["loss"] for step in range(6)]
    assert losses[-1] < losses[0] - 0.01
    engine.export(tmp_path)
    base = load_model(str(model))
    by_peft = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    whole = merged(engine.tensors())
    assert whole.keys() == initial.state_dict().keys() - {"lm_head.weight"}
    moved = 0
    for name, published in whole.items():
        tensor = as_tensor(published)
        torch.testing.assert_close(tensor, by_peft[name])
        assert torch.equal(tensor, exported[name]), name
        moved += not torch.equal(tensor, initial.state_dict()[name])
    assert moved == 14  # seven linear layers in each of two blocks


def test_an_export_of_adapters_over_a_base_in_bfloat16_is_float32(model: Path, tmp_path: Path) -> None:
    """Rounded to the base's format it would be without the small updates."""
    engine = _engine(model, lora={"rank": 4}, learningRate=1e-6)
    _step(engine)
    tensors = engine.tensors()
    halved = {name: as_bytes(as_tensor(one).bfloat16()) for name, one in tensors.items() if ":" not in name}
    policy = build_models(trainer_spec(lora={"rank": 4}), model_path=str(model), device=CPU).model
    model_files.export(
        tmp_path, model=policy, published=tensors | halved, tokenizer=load_tokenizer(str(model)), precision="BF16"
    )
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
    exported = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").state_dict()
    assert {tensor.dtype for tensor in exported.values()} == {torch.float32}
    for name, (lora_a, lora_b, scaling) in split(tensors)[1].items():
        moved = exported[name].double() - as_tensor(halved[name]).double()
        update = (scaling * lora_b @ lora_a).double()
        assert float((moved * update).sum() / (update * update).sum()) == pytest.approx(1.0, abs=0.01)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


def test_the_base_is_published_as_it_began_and_copied_once(model: Path, tmp_path: Path) -> None:
    engine, initial = _engine(model, lora={"rank": 4}), load_model(str(model))
    before = _slices(engine)
    _step(engine)
    after = _slices(engine)
    adapters = {name for name in after if ":lora_" in name}
    assert len(adapters) == 3 * 14
    assert all(after[name] is before[name] for name in after.keys() - adapters)
    assert all(after[name] != before[name] for name in adapters if name.endswith(":lora_B"))
    assert {k: t for k, t in engine.tensors().items() if k not in adapters} == model_files.tensors(initial)
    engine.save(tmp_path).result()
    again = _engine(model, lora={"rank": 4})  # another process, behind a restart
    again.load(tmp_path)
    assert _slices(again) == after


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")  # peft mends it, and says so
def test_a_layer_that_lies_transposed_is_merged_too() -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=33, n_positions=64, n_embd=16, n_layer=1, n_head=2)
    adapted, plain = GPT2LMHeadModel(config).eval(), GPT2LMHeadModel(config).eval()
    add_adapters(adapted, Lora.model_validate({"rank": 2, "targetModules": ("c_attn",)}))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    for name, published in merged(model_files.tensors(adapted)).items():
        plain.state_dict()[name].copy_(as_tensor(published))
    beside = GPT2LMHeadModel(config).eval()
    AdaptedParameters(beside).load(model_files.tensors(adapted))
    tokens = torch.arange(20).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(plain(tokens).logits, adapted(tokens).logits)
        torch.testing.assert_close(beside(tokens).logits, adapted(tokens).logits)


def test_with_adapters_the_reference_is_the_policy_without_them(model: Path) -> None:
    parts = build_models(trainer_spec(lora={"rank": 4}, algorithm=KL), model_path=str(model), device=CPU)
    with torch.no_grad():
        for name, parameter in parts.model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.1)
    batch, initial = _batch(), load_model(str(model))
    answer_logprobs(initial)
    expected = Forward(initial, temperature=1.0).logprobs(batch)
    assert parts.reference is not None
    with parts.reference() as reference:
        torch.testing.assert_close(Forward(reference, temperature=1.0).logprobs(batch), expected)
    assert not torch.allclose(Forward(parts.model, temperature=1.0).logprobs(batch), expected, atol=1e-3)
    assert {p.requires_grad for n, p in parts.model.named_parameters() if "lora_" in n} == {True}
    assert {p.requires_grad for n, p in parts.model.named_parameters() if "lora_" not in n} == {False}


def test_with_a_side_path_the_last_layers_of_policy_and_critic_are_trained(model: Path, tmp_path: Path) -> None:
    engine, initial = _engine(model, rule="ppo", sherl=SHERL), load_model(str(model))
    before = _slices(engine)
    assert {k: t for k, t in engine.tensors().items() if "side_path" not in k} == model_files.tensors(initial)
    _step(engine)
    after = _slices(engine)
    late = {name for name in after if "side_path" in name or ".layers.1." in name}
    assert all(after[name] is before[name] for name in after.keys() - late)
    behind_zeros = {"model.side_path.down", "model.side_path.attention"}
    assert {name for name in late if after[name] != before[name]} >= late - behind_zeros
    engine.export(tmp_path)
    exported = load_model(str(tmp_path)).state_dict()
    assert all(torch.equal(as_tensor(tensor), exported[name]) for name, tensor in engine.tensors().items())
    models = build_models(trainer_spec(rule="ppo", sherl=SHERL), model_path=str(model), device=CPU)
    assert models.critic is not None
    trained = {name for name, p in models.critic.named_parameters() if p.requires_grad}
    assert trained == {name.replace("model.", "body.") for name in late} | {"head.weight", "head.bias"}


@pytest.mark.parametrize("tuning", [{"lora": {}}, {"rule": "ppo", "sherl": SHERL}], ids=["lora", "sherl"])
def test_what_is_tuned_resumes_bit_for_bit(model: Path, tmp_path: Path, tuning: dict[str, Any]) -> None:
    through, resumed = _engine(model, **tuning), _engine(model, **tuning)
    _step(through)
    through.save(tmp_path).result()
    resumed.load(tmp_path)
    assert _step(resumed, 1) == _step(through, 1)
    assert resumed.tensors() == through.tensors()
    with pytest.raises(UserError, match="does not fit this model"):
        _engine(model).load(tmp_path)


@pytest.mark.parametrize(
    ("layers", "rule"),
    [
        (["nothing"], "must name layers of the model, got 'nothing'; take some of down_proj, gate_proj"),
        (["q_proj", "v_prj"], "must name layers of the model, got 'v_prj'"),
        (["q_proj", "proj"], "must name layers of the model, got 'proj'"),
        (["q_proj", "input_layernorm"], "must name linear layers, got 'input_layernorm'"),
        (["q_proj", "mlp"], "must name linear layers, got 'mlp'"),
        (["lm_head"], "must not name a layer with tied weights"),
        (["embed_tokens"], "must name linear layers"),
    ],
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")  # peft says so before we refuse
def test_adapters_go_where_they_can_be_merged(model: Path, layers: list[str], rule: str) -> None:
    with pytest.raises(UserError, match=rf"^spec.trainer.lora.targetModules: {rule}"):
        _engine(model, lora={"targetModules": layers})
