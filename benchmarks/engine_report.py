"""What the cells of the engine benchmark say: figures per way, Markdown tables, a plot."""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from engine_cells import Cell
from engine_ways import BLOCK_CACHE, EARLY_EXIT, LLAMA, WAYS
from ways import ratios

MEBIBYTE = 1 << 20
# Pairs whose ratios are reported side by side, batch size by batch size.
PAIRS = (
    ("ar", "transformers"),
    ("ar", "transformers-static"),
    ("ar", LLAMA),
    ("exact", "ar"),
    ("exact", "transformers"),
    ("exact", "transformers-lookup"),
    ("exact", EARLY_EXIT),
    ("exact", LLAMA),
    ("exact", BLOCK_CACHE),
    ("threshold", "ar"),
    ("threshold", BLOCK_CACHE),
)
# How the plot draws ways that have no color of their own: block caches with other blocks.
OTHERS = tuple(
    {"color": "black", "linestyle": line, "marker": marker}
    for line, marker in (("solid", "s"), ("dashed", "^"), ("dotted", "x"))
)


def summarise(cell: Cell) -> dict[str, dict[str, Any]]:
    """Return the figures of every way of a cell."""
    return {name: _figures(groups, cell) for name, groups in cell.items()}


def _figures(groups: Sequence[dict[str, Any]], cell: Cell) -> dict[str, Any]:
    speed = speeds(groups)
    tokens, first, last, forwards, digests = (
        [value for group in groups for value in group[name]]
        for name in ("tokens", "first_s", "last_s", "forwards", "digests")
    )
    timed = zip(tokens, first, last, strict=True)
    per_token = [1000 * (end - begin) / (n - 1) for n, begin, end in timed if n > 1]
    figures: dict[str, Any] = {
        "tokens_per_s": spread_of(speed),
        "tokens": sum(tokens),
        "ttft_ms": percentiles([1000 * seconds for seconds in first]),
        "tpot_ms": percentiles(per_token),
        "tokens_per_forward": None if None in forwards else sum(tokens) / sum(forwards),
        "ratio_to": {
            other: spread_of(ratios(speed, speeds(theirs))) for other, theirs in cell.items()
        },
    }
    if "ar" in cell:
        expected = [value for group in cell["ar"] for value in group["digests"]]
        equal = sum(a == b for a, b in zip(digests, expected, strict=True))
        figures["same_as_ar"] = equal / len(expected)
    return figures


def speeds(groups: Iterable[dict[str, Any]]) -> list[float]:
    """Return the tokens per second of every group, prompts included."""
    return [sum(group["tokens"]) / group["seconds"] for group in groups]


def spread_of(values: Sequence[float]) -> dict[str, float]:
    """Return median, smallest and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return the 50th and 95th percentile, between neighbours on a straight line."""
    if len(values) < 2:
        return {"p50": values[0], "p95": values[0]} if values else None
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    return {"p50": cuts[9], "p95": cuts[18]}


def split_key(key: str) -> tuple[str, str, int]:
    """Return precision, set and batch size of a cell's name."""
    dtype, name, batch_size = key.split("/")
    return dtype, name, int(batch_size)


def markdown(cells: dict[str, Any]) -> str:
    """Return all tables."""
    measured = {split_key(key): value for key, value in cells.items()}
    speed = {key: value["summary"] for key, value in measured.items() if key[1] != "memory"}
    memory = {key: value for key, value in measured.items() if key[1] == "memory"}
    parts = [_ways_table(key, summary) for key, summary in speed.items()]
    for dtype, name in dict.fromkeys(key[:2] for key in speed):
        columns = {b: summary for (d, n, b), summary in speed.items() if (d, n) == (dtype, name)}
        parts.append(_ratios_table(f"{dtype}, {name}", columns))
    if memory:
        parts.append(_memory_table(memory))
    return "\n\n".join(parts)


def _ways_table(key: tuple[str, str, int], summary: dict[str, dict[str, Any]]) -> str:
    dtype, name, batch_size = key
    rows = []
    for way, figures in summary.items():
        ratio = figures["ratio_to"]
        rows.append(
            [
                way,
                _spread(figures["tokens_per_s"], 1),
                *(_spread(ratio.get(other), 2) for other in ("ar", "transformers")),
                _number(figures["tokens_per_forward"], 2),
                *(_pair(figures[name]) for name in ("ttft_ms", "tpot_ms")),
                _percent(figures.get("same_as_ar")),
            ]
        )
    header = [
        *("way", "tokens/s", "to `ar`", "to `transformers`", "TPF"),
        *("first token, ms", "per token, ms", "answers of `ar`"),
    ]
    return _table(f"{dtype}, {name}, batch size {batch_size}", header, rows)


def _ratios_table(title: str, columns: dict[int, dict[str, dict[str, Any]]]) -> str:
    rows = []
    for ours, theirs in PAIRS:
        found = [
            summary[ours]["ratio_to"].get(theirs) if ours in summary else None
            for summary in columns.values()
        ]
        if any(found):
            rows.append([f"`{ours}` / `{theirs}`", *(_spread(ratio, 2) for ratio in found)])
    header = ["tokens/s, ratio", *(f"batch {batch_size}" for batch_size in columns)]
    return _table(f"{title}: ratios", header, rows)


def _memory_table(memory: dict[tuple[str, str, int], dict[str, dict[str, int]]]) -> str:
    names = ("peak_bytes", "weight_bytes", "cache_bytes", "rows_bytes", "text_bytes")
    rows = [
        [dtype, str(batch_size), way, *(_mebibytes(taken.get(name)) for name in names)]
        for (dtype, _, batch_size), ways in memory.items()
        for way, taken in ways.items()
    ]
    header = [
        *("precision", "batch", "way", "peak of the process", "weights"),
        *("KV cache", "rows x longest text", "all texts"),
    ]
    return _table("Memory, MiB", header, rows)


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"### {title}", "", *(_line(row) for row in [header, ["---"] * len(header), *rows])]
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _spread(value: dict[str, float] | None, digits: int) -> str:
    if value is None:
        return "-"
    low, high = value["min"], value["max"]
    return f"{value['median']:.{digits}f} ({low:.{digits}f}..{high:.{digits}f})"


def _pair(value: dict[str, float] | None) -> str:
    return "-" if value is None else f"{value['p50']:.1f} / {value['p95']:.1f}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _mebibytes(value: int | None) -> str:
    return "-" if value is None else f"{value / MEBIBYTE:.0f}"


def plot(cells: dict[str, Any], path: Path) -> None:
    """Draw tokens per second over the batch size, a panel per precision and set.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit(
            "The plot needs matplotlib: pip install 'mars-lm[benchmarks]'. The same command then "
            "draws it from the JSON file, without measuring again."
        ) from error
    speed = {split_key(k): v["summary"] for k, v in cells.items() if split_key(k)[1] != "memory"}
    panels = list(dict.fromkeys(key[:2] for key in speed))
    if not panels:
        return
    across = max(Counter(dtype for dtype, _ in panels).values())
    dtypes = list(dict.fromkeys(dtype for dtype, _ in panels))
    figure = Figure(figsize=(4.2 * across + 2, 4 * len(dtypes)), layout="constrained")
    axes = figure.subplots(len(dtypes), across, squeeze=False, sharey=True)
    found = dict.fromkeys(way for summary in speed.values() for way in summary)
    known = [way for way in WAYS if way in found] + sorted(set(found) - set(WAYS))
    handles: dict[str, Any] = {}
    for row, dtype in zip(axes, dtypes, strict=True):
        names = [name for d, name in panels if d == dtype]
        for axis in row[len(names) :]:
            axis.set_visible(False)
        for axis, name in zip(row, names, strict=False):
            columns = {b: s for (d, n, b), s in sorted(speed.items()) if (d, n) == (dtype, name)}
            handles |= _draw(axis, columns, known)
            axis.set_title(f"{name}, {dtype}")
            _scale(axis, sorted({batch_size for _, _, batch_size in speed}))
        row[0].set_ylabel("tokens per second\n(median, smallest to largest group)")
    figure.legend([handles[way] for way in known], known, loc="outside right upper", frameon=False)
    # Text stays text; and without a date and random names a picture of the same figures is the
    # same file.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "mars"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw(
    axis: Any, columns: dict[int, dict[str, dict[str, Any]]], known: Sequence[str]
) -> dict[str, Any]:
    """Draw the ways of a panel; return a handle of each for the legend."""
    handles = {}
    ways = [way for way in known if any(way in summary for summary in columns.values())]
    others = [way for way in known if way not in WAYS]
    for number, way in enumerate(ways):
        points = [(b, s[way]["tokens_per_s"]) for b, s in columns.items() if way in s]
        beside = 2 ** (0.04 * (number - (len(ways) - 1) / 2))  # bars must not hide each other
        sizes = [batch_size * beside for batch_size, _ in points]
        median = [value["median"] for _, value in points]
        below = [value["median"] - value["min"] for _, value in points]
        above = [value["max"] - value["median"] for _, value in points]
        style = (
            {"color": f"C{WAYS.index(way)}"}
            if way in WAYS
            else OTHERS[others.index(way) % len(OTHERS)]
        )
        handles[way] = axis.errorbar(
            *(sizes, median, [below, above]),
            **{"marker": "o", "markersize": 4, "capsize": 2, "linewidth": 1.2, **style},
        )
    return handles


def _scale(axis: Any, sizes: Sequence[int]) -> None:
    """Give a panel logarithmic axes with plain numbers."""
    from matplotlib.ticker import LogFormatter

    axis.set_xlabel("batch size")
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [str(batch_size) for batch_size in sizes])
    axis.set_xlim(sizes[0] / 1.3, sizes[-1] * 1.3)
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(3, 0.5)))
    axis.grid(which="both", alpha=0.25)
