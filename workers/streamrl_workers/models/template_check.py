"""Tries a model's chat template before any process relies on it. As a program, the trial: `python -m streamrl_workers.models.template_check SECONDS`.

A chat template is a program: jinja's sandbox keeps it from files and from Python, but not from endless loops and large texts. So the first
rendering is done in a process that is ended beyond its bounds. Consumes {"template", "tokens"} on standard input; produces an exit code.
What a template refuses in words is no matter of this module (`tasks/chat.py`).
"""

import json
import resource
import subprocess
import sys
from typing import Any

from streamrl.errors import UserError

CPU_S = 20
MOST_DATA_BYTES = 2 * 2**30
MOST_CHARS = 2**20
"""Of a conversation of two short turns."""
_DEADLINE_S = 600.0
"""A busy machine gives the trial a part of a core."""
_TOO_LARGE = 3
_CONVERSATION = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]


def check_template(tokenizer: Any, *, model_path: str) -> None:  # noqa: ANN401 - a tokenizer of transformers, of any class
    """Refuse a chat template that does not come to an end. Raises `UserError`."""
    try:
        template = tokenizer.get_chat_template() if tokenizer.chat_template else None
    except ValueError:  # several, of which none is the default
        template = None
    if template is None:
        return
    tokens = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    try:
        trial = subprocess.run(
            [sys.executable, "-m", __name__, str(CPU_S)],
            input=json.dumps({"template": template, "tokens": tokens}),
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_DEADLINE_S,
            check=False,
        )
        is_good = trial.returncode == 0
    except subprocess.TimeoutExpired:
        is_good = False
    if not is_good:
        bounds = f"{CPU_S} s of a core, {MOST_DATA_BYTES // 2**30} GiB and {MOST_CHARS} characters"
        raise UserError(
            field=f"chat template of {model_path}",
            rule=f"must render two short turns within {bounds}",
            fix="take the template of a model that you trust",
        )


def main() -> int:
    """Render what standard input has; the exit code."""
    cpu_s = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_DATA_BYTES, MOST_DATA_BYTES))
    given = json.load(sys.stdin)
    is_bounded = all(_is_bounded(is_open=is_open, **given) for is_open in (False, True))
    return 0 if is_bounded else _TOO_LARGE


def _is_bounded(*, template: str, tokens: dict[str, Any], is_open: bool) -> bool:
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        rendered: Any = render_jinja_template(
            [_CONVERSATION], chat_template=template, add_generation_prompt=is_open, **tokens
        )
    except MemoryError:
        return False
    except Exception:  # noqa: BLE001 - whatever a template raises: it has come to an end
        return True
    return sum(map(len, rendered[0])) <= MOST_CHARS


if __name__ == "__main__":
    sys.exit(main())
