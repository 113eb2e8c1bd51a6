"""The results of ``quality.py`` as a plot: a dot a case, a line from its best seed to its worst."""

from collections.abc import Mapping, Sequence
from html import escape

ROW, LEFT, WIDTH, RIGHT = 20, 380, 420, 70
"""Heights and widths in SVG units: a row, the labels, the axis, the figures beside it."""


def plot(rows: Sequence[Mapping[str, object]]) -> str:
    """An SVG of the rows, grouped by study; lower is better and to the left."""
    means = [float(str(row["bits per byte"])) for row in rows]
    spreads = [float(str(row["spread"])) for row in rows]
    low = min(m - s for m, s in zip(means, spreads, strict=True))
    high = max(m + s for m, s in zip(means, spreads, strict=True))
    scale = WIDTH / (high - low or 1.0)
    parts: list[str] = []
    y, study = 10, None
    for row, mean, spread in zip(rows, means, spreads, strict=True):
        if row["study"] != study:
            study, y = row["study"], y + ROW // 2
            parts.append(_text(10, y + ROW, str(study), "bold"))
        y += ROW
        x, half = LEFT + (mean - low) * scale, spread * scale / 2
        parts.append(_text(100, y, str(row["case"])))
        parts.append(_line(LEFT, y - 4, LEFT + WIDTH, y - 4, "#ddd"))
        parts.append(_line(x - half, y - 4, x + half, y - 4, "#369"))
        parts.append(f'<circle cx="{x:.1f}" cy="{y - 4}" r="4" fill="#369"/>')
        parts.append(_text(LEFT + WIDTH + 10, y, f"{mean:.3f}"))
    size = f'width="{LEFT + WIDTH + RIGHT}" height="{y + ROW}"'
    style = 'font-family="sans-serif" font-size="12"'
    background = '<rect width="100%" height="100%" fill="white"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{background}'
    return "\n".join([head, *parts, "</svg>", ""])


def _text(x: float, y: float, text: str, weight: str = "normal") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" font-weight="{weight}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{color}" stroke-width="2"/>'
