"""Literals in prompts and observations: strings that look like control tokens and are text.

A chat template writes control tokens as text, so a rendered conversation no longer shows which `<|im_end|>` is the template's and which
stood in a question. Under `chat` the latter travels with a mark behind its first character, and a mark that is people's own is doubled.
Generators take marks out when they tokenize; texts for people are without (`unmarked`).
"""

import re

MARK = "\ufdd0"
"""A noncharacter of Unicode."""
MARKS = re.compile(f"{MARK}({MARK}?)")


def unmarked(text: str) -> str:
    """Return the text as people read it."""
    return MARKS.sub(r"\1", text)
