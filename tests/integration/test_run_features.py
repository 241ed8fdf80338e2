"""Many features in one real job: a chat model from disk, a data set on disk, turns, PPO with a critic, LoRA, whole batches."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from support.chat_models import chat_tokenizer
from support.runs import LocalRun, streamrl

STEPS = 3
GAME = '''
class Echo:
    """Says what it was told, once; pays for short turns."""

    def __init__(self):
        self.turns = 0

    def step(self, completion):
        self.turns += 1
        return f"you said {completion[:4]}", 1.0 / (1 + len(completion)), self.turns == 2


def play(*, question, answer, metadata, seed):
    return Echo()
'''

pytestmark = pytest.mark.timeout(400)


def save_model(directory: Path) -> None:
    tokenizer = chat_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=64,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def job() -> dict[str, object]:
    task = {
        "dataset": {"huggingFace": {"path": "rows", "promptField": "question"}},
        "chat": {"systemPrompt": "Be brief.", "templateArguments": {"enable_thinking": False}},
        "environment": {"python": {"function": "game:play"}, "maxTurns": 3},
        "groupSize": 4,
        "sampling": {"maxTokens": 8},
        "rewards": [
            {"name": "game", "weightPercent": 80, "environment": {}},
            {"name": "digit", "weightPercent": 20, "regex": {"pattern": "[0-9]"}},
        ],
        "evaluation": {"maxPrompts": 4, "intervalSteps": 2},
    }
    ppo = {"epochs": 2, "miniBatches": 2, "referenceKl": {"coefficient": 0.01, "estimator": "K1"}}
    return {
        "apiVersion": "streamrl.io/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "features"},
        "spec": {
            "model": {"path": {"directory": "model"}},
            "task": task,
            "algorithm": {"ppo": ppo, "correction": {"decoupledPpo": {}}},
            "pipeline": {"mode": "Batch", "maxStalenessSteps": 1, "batchGroups": 4, "steps": STEPS},
            "generators": [{"name": "g", "engine": {"hf": {"slots": 16}}}],
            "trainer": {"learningRate": 1e-3, "microBatchTokens": 512, "lora": {"rank": 4}},
        },
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRun]:
    base = tmp_path_factory.mktemp("features")
    save_model(base / "model")
    (base / "rows").mkdir()
    rows = [json.dumps({"question": f"say {number}"}) for number in range(60)]
    (base / "rows" / "train.jsonl").write_text("\n".join(rows))
    (base / "game.py").write_text(GAME)
    made = LocalRun.start(job(), folder=base / "run", base_dir=base)
    assert made.process.wait(390) == 0, made.logs()
    yield made


def test_every_group_is_in_one_step(run: LocalRun) -> None:
    assert run.steps() == STEPS
    check = run.check()
    assert check.returncode == 0, check.stdout + check.stderr


def test_the_steps_measure_turns_critic_reference_and_parts(run: LocalRun) -> None:
    lines = [json.loads(line) for line in (run.folder / "metrics" / "steps.jsonl").read_text().splitlines()]
    assert all(line["turns_mean"] == 2 for line in lines)
    assert all(set(line["reward_parts"]) == {"game", "digit"} for line in lines)
    trainer = [line["trainer"] for line in lines]
    assert all(numbers["updates"] == 4 and numbers["value_loss"] > 0 for numbers in trainer)
    assert 0 < abs(trainer[0]["reference_kl"]) < 0.01  # the first of its updates still is the reference
    assert max(line["staleness_max"] for line in lines) <= 1


def test_the_exported_model_answers_in_the_chat_template(run: LocalRun) -> None:
    done = streamrl("generate", "--checkpoint", str(run.folder), "--prompt", "say 7", "--max-tokens", "4")
    assert done.returncode == 0, done.stderr
