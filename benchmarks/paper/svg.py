"""Small charts as SVG text: groups of bars, and steps over time. Pure; no dependency."""

from collections.abc import Mapping, Sequence
from html import escape

from streamrl_cli.reporting.page import INK, SEVERAL

_WIDTH, _HEIGHT = 720, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 12, 44, 34
_GRID = "#e3e8ee"
_LINES = 4
_Point = tuple[float, float]


def bars(title: str, names: Sequence[str], series: Mapping[str, Sequence[float]]) -> str:
    """One group of bars for each name, one bar for each series."""
    top = max(value for values in series.values() for value in values) * 1.08
    width = (_WIDTH - _LEFT - _RIGHT) / len(names)
    bar = 0.8 * width / len(series)
    parts = []
    for place, (values, colour) in enumerate(zip(series.values(), SEVERAL, strict=False)):
        for number, value in enumerate(values):
            x, y = _LEFT + width * number + 0.1 * width + bar * place, _y(value, top)
            tip = escape(f"{names[number]}: {value:.4g}")
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{bar * 0.94:.1f}" height="{_HEIGHT - _BOTTOM - y:.1f}" fill="{colour}">'
                f"<title>{tip}</title></rect>"
            )
    labels = [_text(_LEFT + width * (n + 0.5), _HEIGHT - _BOTTOM + 16, name) for n, name in enumerate(names)]
    return _chart(title, list(series), top, [*parts, *labels])


def stairs(title: str, series: Mapping[str, Sequence[_Point]], *, end: float, x_title: str) -> str:
    """Values that hold from a place on; each series begins at its first point."""
    top = max(y for points in series.values() for _, y in points) * 1.08
    parts = []
    for points, colour in zip(series.values(), SEVERAL, strict=False):
        path = []
        for (x, y), following in zip(points, [*(x for x, _ in points[1:]), end], strict=True):
            path += [f"{_x(x, end):.1f},{_y(y, top):.1f}", f"{_x(following, end):.1f},{_y(y, top):.1f}"]
        parts.append(f'<polyline points="{" ".join(path)}" fill="none" stroke="{colour}" stroke-width="2"/>')
    marks = [_text(_x(end * n / 5, end), _HEIGHT - _BOTTOM + 16, f"{end * n / 5:.3g}") for n in range(6)]
    return _chart(title, list(series), top, [*parts, *marks, _text(_WIDTH / 2, _HEIGHT - 4, x_title)])


def _chart(title: str, names: Sequence[str], top: float, parts: Sequence[str]) -> str:
    grid = []
    for number in range(_LINES + 1):
        value = top * number / _LINES
        y = _y(value, top)
        grid.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{_GRID}"/>')
        grid.append(_text(_LEFT - 6, y + 4, f"{value:.3g}", anchor="end"))
    legend = []
    for number, (name, colour) in enumerate(zip(names, SEVERAL, strict=False)):
        x = _LEFT + 150 * number
        legend.append(f'<rect x="{x}" y="26" width="10" height="10" fill="{colour}"/>')
        legend.append(_text(x + 15, 35, name, anchor="start"))
    body = "".join([_text(_LEFT, 17, title, anchor="start", size=14), *legend, *grid, *parts])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="system-ui, sans-serif">'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>{body}</svg>\n'
    )


def _text(x: float, y: float, text: str, *, anchor: str = "middle", size: int = 11) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{INK}" text-anchor="{anchor}">{escape(text)}</text>'


def _y(value: float, top: float) -> float:
    return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / top


def _x(value: float, end: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * value / end
