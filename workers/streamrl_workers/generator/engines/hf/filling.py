"""Fills rows with the keys and values of their sequences, computing as little as it can.

Owns: the sharing of prefills, within one call (samples of a group) and with earlier ones (the cache). Does
not own: tokenizing, which sequence is in which row.
"""

from collections.abc import Sequence

from streamrl_workers.generator.engines.hf.prompts import PrefillCache
from streamrl_workers.generator.engines.hf.runner import Runner
from streamrl_workers.generator.engines.hf.sequences import ActiveSequence
from streamrl_workers.generator.engines.hf.slot_cache import Prefilled


class Filling:
    """Prefill with sharing."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._kept = PrefillCache()

    def fill(self, sequences: Sequence[ActiveSequence], *, first_row: int) -> None:
        """Put all but the last token of each sequence into its row, starting at `first_row`."""
        rows: dict[tuple[int, ...], list[int]] = {}
        for row, seq in enumerate(sequences, start=first_row):
            held = tuple(seq.tokens[:-1])
            if held:
                rows.setdefault(held, []).append(row)
        prompts = {seq.prompt[:-1] for seq in sequences if not seq.completion}
        for held, prefilled in self._prefilled(list(rows)).items():
            self._runner.cache.write(rows[held], prefilled)
            if held in prompts:  # a sequence in the midst of its completion comes only once
                self._kept.put(held, prefilled)

    def forget(self) -> None:
        """Drop what the old weights computed, in the rows too."""
        self._kept.clear()
        self._runner.cache.clear()

    def _prefilled(self, wanted: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], Prefilled]:
        found = {tokens: kept for tokens in wanted if (kept := self._kept.get(tokens)) is not None}
        missing = [tokens for tokens in wanted if tokens not in found]
        return found | dict(zip(missing, self._runner.prefill(missing), strict=True))
