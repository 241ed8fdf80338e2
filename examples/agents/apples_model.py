"""Makes what `apples.yaml` needs, beside this file: a small chat model that calls tools, carelessly, and the questions.

    python apples_model.py [FOLDER [STEPS]]      # some minutes on two cores

The model is a Qwen3 of 0.1 M parameters. It has imitated players who guess more often than they look. Its tokenizer has a
token for each character and for each phrase of this little world. Its chat template is Qwen's in small: it names the tools.
"""

import json
import sys
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from streamrl.spec.model import ScratchModel
from streamrl_workers.models.scratch import build_model
from streamrl_workers.models.warm_up import WarmUpPair, warm_up

NAMES = ["Ann", "Bob", "Cid", "Dan", "Eve", "Fay", "Gil", "Hal"]
CAREFUL_PERCENT = 45
"""Share of the demonstrated turns that call the tool that is needed; the others guess."""
QUESTIONS = 512
SIZES = {
    "hiddenSize": 64,
    "layers": 2,
    "heads": 4,
    "intermediateSize": 192,
    "maxPositions": 256,
}
STEPS = 1000
START, END = "<|im_start|>", "<|im_end|>"
SEARCH = '<tool_call>{"name": "search", "arguments": {"query": "'
CALCULATE = '<tool_call>{"name": "calculate", "arguments": {"expression": "'
CALLED = '"}}</tool_call>'
ASKED, ANSWERED = f"{START}system\nsearch calculate {END}\n{START}user\n", f"\n{START}assistant\n"
PHRASES = [SEARCH, CALCULATE, CALLED, "<tool_response>", "</tool_response>", "system\n", "user\n", "assistant\n"]
PHRASES += [*NAMES, "search ", "calculate ", "How many apples do ", " and ", " have?", " has ", " apples"]
TEMPLATE = """{%- if tools %}<|im_start|>system\n{% for tool in tools | sort(attribute='function.name', reverse=true) %}{{ tool.function.name + ' ' }}{% endfor %}<|im_end|>\n{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>' + message.content + '</tool_response>' }}
{%- else %}{{ '<|im_start|>' + message.role + '\n' + message.content }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) + '</tool_call>' }}{% endfor -%}
{%- endif %}{{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def world(random: Random) -> tuple[dict[str, int], str, str]:
    """Who has how many apples, and the two that are asked about."""
    first, second = random.sample(NAMES, 2)
    return {name: random.randrange(10) for name in NAMES}, first, second


def question(first: str, second: str) -> str:
    return f"How many apples do {first} and {second} have?"


def demonstration(random: Random) -> WarmUpPair:
    """A whole conversation of a careless player, who guesses before all is known."""
    apples, *asked = world(random)
    numbers = [apples[name] for name in asked]
    steps = [
        "".join(f"{SEARCH}{name}{CALLED}" for name in asked) + END,
        "".join(heard(f"{name} has {apples[name]} apples") for name in asked) + ANSWERED,
        f"{CALCULATE}{numbers[0]}+{numbers[1]}{CALLED}{END}",
        f"{heard(str(sum(numbers)))}{ANSWERED}",
    ]
    said, guess = "", sum(numbers)
    for own, observation in zip(steps[::2], steps[1::2], strict=True):
        if random.randrange(100) >= CAREFUL_PERCENT:
            guess = random.randrange(19)
            break
        said += own + observation
    return WarmUpPair(prompt=f"{ASKED}{question(*asked)}{END}{ANSWERED}", target=f"{said}{guess}")


def heard(result: str) -> str:
    """What a tool says, as the template writes it."""
    return f"\n{START}user\n<tool_response>{result}</tool_response>{END}"


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each character and each phrase."""
    characters = sorted({"\n", *map(chr, range(32, 127))})
    core = Tokenizer(models.WordLevel({text: number for number, text in enumerate(characters)}, unk_token=" "))  # noqa: S106
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    core.add_tokens([AddedToken(phrase, normalized=False) for phrase in PHRASES])
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[START],
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = TEMPLATE
    return made


def main(folder: Path, *, steps: int = STEPS, seed: int = 0) -> None:
    """Write `apples.jsonl` and `apples-model`."""
    random, words = Random(seed), tokenizer()
    warm = {"steps": steps, "batchSize": 32, "learningRate": 3e-3}
    spec = ScratchModel.model_validate({**SIZES, "warmUp": warm})
    model = build_model(spec, tokenizer=words, seed=seed)
    pairs = iter(lambda: demonstration(random), None)
    for done in warm_up(model, tokenizer=words, pairs=pairs, spec=spec.warm_up):
        if done.step % 100 == 0:
            sys.stdout.write(f"warm-up {done.step}/{done.steps}: loss {done.loss:.3f}\n")
    words.save_pretrained(folder / "apples-model")
    model.save_pretrained(folder / "apples-model")
    with (folder / "apples.jsonl").open("w") as file:
        for _ in range(QUESTIONS):
            apples, first, second = world(random)
            notes = [f"{name} has {count} apples" for name, count in apples.items()]
            asked = {"prompt": question(first, second), "answer": str(apples[first] + apples[second]), "notes": notes}
            file.write(json.dumps(asked) + "\n")


if __name__ == "__main__":
    main(
        Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent,
        steps=int(sys.argv[2]) if sys.argv[2:] else STEPS,
    )
