"""A tokenizer with a chat template as instruction-tuned models have them (ChatML), saved as `save_pretrained` does."""

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

START, END, BOS = "<|im_start|>", "<|im_end|>", "<|bos|>"
TEMPLATE = """{{ bos_token }}{%- for message in messages -%}
{%- if message.role not in ('system', 'user', 'assistant') %}{{ raise_exception('unknown role') }}{% endif -%}
{%- if message.role == 'system' and not allow_system | default(true) %}{{ raise_exception('no system turn here') }}{% endif -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""
TOOL_TEMPLATE = """{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>' + message.content + '</tool_response><|im_end|>\n' }}
{%- else %}{{ '<|im_start|>' + message.role + '\n' + message.content }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) + '</tool_call>' }}{% endfor -%}
{{ '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""With tools, as Qwen's and Hermes' models have them."""
CHARACTERS = sorted({chr(code) for code in range(32, 127)} | {"\n"})


def chat_tokenizer(*, template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """A token for each character; plain encoding puts BOS first, as Llama's does."""
    vocabulary = {token: number for number, token in enumerate([BOS, START, END, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[START],
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = template
    return made


def save_tokenizer(directory: Path, *, template: str | None = TEMPLATE) -> str:
    """The directory, as a text."""
    chat_tokenizer(template=template).save_pretrained(directory)
    return str(directory)
