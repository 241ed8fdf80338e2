"""What the rules on names and structure still put up with. Each list only shrinks; an empty one stays empty."""

OLD_WORDS: dict[str, frozenset[str]] = {}
"""Kind, as `tests/architecture/words.md` names it -> names that still have an old word."""
TWO_MEANINGS: frozenset[str] = frozenset()
"""Classes that are defined more than once."""
LARGE_FOLDERS: frozenset[str] = frozenset()
"""Folders with too many modules."""
CIRCLES: frozenset[str] = frozenset()
"""Folders, and modules beside them, that import each other in a circle."""
MOST_SHORT = 0.25
"""Share of the workers' modules that may be short. A quarter is the aim: what is spread over many files is read in none."""
