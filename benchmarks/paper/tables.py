"""Tables of docs/reference/paper-tables.md: the paper's number, ours, the error. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean

from paper.holdout import Cell

AIM_MEAN, AIM_MOST = 0.15, 0.30
FIT_MEAN, FIT_MOST = 0.05, 0.15
Band = Mapping[tuple[str, str], Sequence[float]]
"""Cell -> our values under the knobs' other settings."""


def cells(found: Iterable[Cell], *, band: Band | None = None) -> Iterator[str]:
    """A row a name, a column a table of the paper; with a band, least and greatest value under the other settings."""
    by_key = {(cell.table, cell.name): cell for cell in found}
    grids: dict[tuple[str, ...], list[str]] = {}
    for table in dict.fromkeys(table for table, _ in by_key):
        grids.setdefault(tuple(name for of, name in by_key if of == table), []).append(table)
    for place, (names, columns) in enumerate(grids.items()):
        yield from [""] * bool(place)
        yield f"| paper → ours, error{' (band)' if band is not None else ''} | " + " | ".join(columns) + " |"
        yield "|---" * (1 + len(columns)) + "|"
        for name in names:
            yield f"| {name} | " + " | ".join(_number(by_key[table, name], band or {}) for table in columns) + " |"


def _number(cell: Cell, band: Band) -> str:
    text = f"{cell.paper:.3g} → {cell.ours:.3g}, {cell.error:+.0%}"
    values = [cell.ours, *band.get((cell.table, cell.name), ())]
    return f"{text} ({min(values):.3g} to {max(values):.3g})" if len(values) > 1 else text


def errors(found: Sequence[Cell], *, mean: float, most: float) -> str:
    """One sentence on a set of cells against its aim."""
    sizes = [abs(cell.error) for cell in found]
    worst = max(found, key=lambda cell: abs(cell.error))
    above = sum(size > most for size in sizes)
    return (
        f"{len(found)} numbers: mean error {fmean(sizes):.1%} (aim {mean:.0%}), largest {max(sizes):.0%} "
        f"({worst.table}, {worst.name}; aim {most:.0%}), above the aim's limit: {above}."
    )


def by_table(found: Sequence[Cell]) -> Iterator[str]:
    """Mean and largest error of each of the paper's tables."""
    yield "| | numbers | mean error | largest |"
    yield "|---|---|---|---|"
    for table in dict.fromkeys(cell.table for cell in found):
        sizes = [abs(cell.error) for cell in found if cell.table == table]
        yield f"| {table} | {len(sizes)} | {fmean(sizes):.1%} | {max(sizes):.0%} |"
