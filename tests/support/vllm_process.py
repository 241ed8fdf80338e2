"""A process as vLLM starts it: it registers StreamRL's plugin."""

import atexit
import gc
from pathlib import Path


def end(found: Path) -> None:
    """Register, and write into `found` at the end how many objects are kept from the search for garbage."""
    from streamrl_workers.generator.engines.vllm.plugin import register

    atexit.register(
        lambda: found.write_text(str(gc.get_freeze_count()))
    )  # called after those that are registered later
    register()
    register()  # vLLM does so as well
    gc.unfreeze()  # as vLLM does when it ends
