"""Literals in prompts and observations: strings that look like control tokens and are text.

A chat template writes control tokens as text, so a rendered conversation no longer shows which `<|im_end|>` is the template's and which
stood in a question. Of texts under `chat`, a mark stands before each control string that is text, and before each mark. Generators
take it out when they tokenize; texts for people are without (`unmarked`).
"""

import re

MARK = "\ufdd0"
"""A noncharacter of Unicode."""


def unmarked(text: str) -> str:
    """Return the text as people read it."""
    return re.sub(f"{MARK}(.?)", r"\1", text, flags=re.DOTALL) if MARK in text else text
