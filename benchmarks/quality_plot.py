"""The results of ``quality.py`` as a plot: a dot a case, a line from its best seed to its worst."""

from collections.abc import Mapping, Sequence
from html import escape

ROW, LEFT, WIDTH, RIGHT = 20, 330, 420, 60
"""In SVG units: height of a row; widths of the labels, the axis and the figures beside it."""
INK, GRID, DOT, DATA_PARALLEL = "#222", "#ddd", "#1f5fa8", "#c2571a"


def plot(rows: Sequence[Mapping[str, object]]) -> str:
    """An SVG of the rows, grouped by study; lower is better and to the left."""
    values = [[float(str(row[key])) for key in ("best", "bits per byte", "worst")] for row in rows]
    low, high = min(v[0] for v in values), max(v[2] for v in values)
    margin = 0.04 * (high - low) or 0.5
    low, high = low - margin, high + margin

    def x(value: float) -> float:
        return LEFT + (value - low) * WIDTH / (high - low)

    parts: list[str] = []
    y, study = 10, None
    for row, (best, mean, worst) in zip(rows, values, strict=True):
        if row["study"] != study:
            study, y = row["study"], y + ROW // 2
            y += ROW
            parts.append(_text(10, y, str(study), "bold"))
        y += ROW
        color = DATA_PARALLEL if "data parallel" in str(row["case"]) else DOT
        parts.append(_text(20, y, str(row["case"])))
        parts.append(_line(x(best), y - 4, x(worst), y - 4, color, 3))
        parts.append(f'<circle cx="{x(mean):.1f}" cy="{y - 4}" r="4.5" fill="{color}"/>')
        parts.append(_text(LEFT + WIDTH + 10, y, f"{mean:.3f}"))
    y += ROW
    grid = [_line(x(tick), 24, x(tick), y - 12, GRID, 1) for tick in _ticks(low, high)]
    labels = [_text(x(tick) - 10, y, f"{tick:.1f}") for tick in _ticks(low, high)]
    title = _text(
        LEFT, 16, "held-out bits per byte: lower is better; lines from best to worst seed"
    )
    size = f'width="{LEFT + WIDTH + RIGHT}" height="{y + ROW // 2}"'
    style = 'font-family="sans-serif" font-size="12"'
    background = '<rect width="100%" height="100%" fill="white"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{background}'
    return "\n".join([head, title, *grid, *labels, *parts, "</svg>", ""])


def _ticks(low: float, high: float) -> list[float]:
    """The tenths between, or every second or fifth of them, ten at most."""
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100) if (high - low) * 10 / step <= 10)
    return [
        n / 10 for n in range(int(low * 10), int(high * 10) + 1) if n % step == 0 and n / 10 > low
    ]


def _text(x: float, y: float, text: str, weight: str = "normal") -> str:
    content = escape(text)
    return f'<text x="{x:.0f}" y="{y:.0f}" font-weight="{weight}" fill="{INK}">{content}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, color: str, width: int) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{color}" stroke-width="{width}"/>'
