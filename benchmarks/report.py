# SPDX-License-Identifier: Apache-2.0
"""The tables and the plot of a run of the suite, and the page that shows them.

python benchmarks/report.py [RESULTS.json]

Prints the tables and draws the plots beside the file. Without a file it takes
docs/performance.json, which `make bench ARGS=--write` replaces, and makes the tables of
docs/performance.md and of benchmarks/README.md anew, and the plots.
"""

import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from targets import OVER, SPEED_UPS, TARGETS, Target, case, figures

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = (DOCS / "performance.md", DOCS / "shares.md", Path(__file__).with_name("README.md"))
STORED = DOCS / "performance.json"
PLOTS = [DOCS / "images" / name for name in ("performance.png", "exchange.png")]


def markdown(head: list[str], rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    lines = [
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(line, widths))} |"
        for line in (head, ["-" * width for width in widths], *rows)
    ]
    return "\n".join(lines)


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def shape_text(shape: str) -> str:
    return f"({shape.replace('x', ', ')})"


def where(figure: dict) -> str:
    if "shape" not in figure:
        return ""
    words = [figure["layout"]] * (figure["layout"] != "contiguous")
    words += [figure["dtype"]] * (figure["dtype"] != "float32")
    words += [f"{figure['memory']} memory"] * (figure["memory"] != "reused")
    words += [f"{figure['threads']} threads"] * (figure["threads"] != 1)
    return ", ".join([shape_text(figure["shape"]), *words])


def target_row(target: Target, direction: str, all_figures: list[dict]) -> list[str]:
    limit, over, speed_up = target.limits[direction], target.over, target.over in SPEED_UPS
    begin = [target.name, direction, f"{'≥' if speed_up else '≤'} {limit:g} {OVER[over]}"]
    kind = case(over=over, direction=direction)
    found = [f for f in all_figures if kind(f) and target.includes(f)]
    if not found:
        return [*begin, "not measured", "", ""]
    # How many times the limit each is off: above 1 it is missed.
    off = [limit / f["ratio"][1] if speed_up else f["ratio"][1] / limit for f in found]
    worst = found[off.index(max(off))]
    low, median, high = worst["ratio"]
    state = "reached" if max(off) <= 1 else f"{math.ceil(100 * (max(off) - 1))} % to go"
    if len(found) > 1 and max(off) > 1:
        state += f", {sum(o <= 1 for o in off)} of {len(found)} reached"
    return [*begin, f"{median:.2f} [{low:.2f}, {high:.2f}]", where(worst), state]


def targets_table(results: dict) -> str:
    found = list(figures(results))
    rows = [target_row(t, direction, found) for t in TARGETS for direction in t.limits]
    return markdown(
        ["Target", "Direction", "Limit", "Worst case [quartiles]", "Where", "Reached"], rows
    )


class Pivot(NamedTuple):
    """A table of a part of the results: a line for equal keys, columns for what differs."""

    title: str
    keys: list[str]
    column: str
    cell: Callable[[dict], str]
    includes: Callable[[dict], bool] = lambda row: True


def milliseconds(row: dict) -> str:
    return number(row["milliseconds"][1])


def pass_cell(row: dict) -> str:
    is_copy = row["pass"].startswith("copy")
    return f"{row['gigabytes_per_second']:.0f} GB/s" if is_copy else f"{row['times_copy'][1]:.2f}"


PIVOTS = {
    "passes": Pivot(
        "Times of the passes over the fastest copy's; float32, one thread, reused memory",
        ["shape", "layout"],
        "pass",
        pass_cell,
        case(dtype="float32", threads=1, memory="reused"),
    ),
    "layers": Pivot(
        "One layer in one process: milliseconds of ours / of PyTorch's",
        ["shape", "layout", "dtype", "memory", "threads"],
        "direction",
        lambda row: " / ".join(number(row["milliseconds"][n][1]) for n in ("syncbn", "PyTorch")),
    ),
    "welford": Pivot(
        "Forward of one float32 layer on one thread: least milliseconds (over PyTorch's)",
        ["shape", "layout"],
        "variant",
        lambda row: f"{number(row['least'])} ({row['ratio']:.2f})",
    ),
    "exchange": Pivot(
        "One all-reduce of a float32 layer's message: microseconds, median / 99th percentile",
        ["ranks", "channels"],
        "engine",
        lambda row: f"{number(row['microseconds'][1])} / {number(row['p99'])}",
    ),
    "curve": Pivot(
        "One all-reduce by ranks: microseconds on a rank's processor / in all (median)",
        ["channels", "engine"],
        "ranks",
        lambda row: f"{number(row['processor'])} / {number(row['microseconds'][1])}",
    ),
    "threads": Pivot(
        "Time of two ranks that are threads over that of two threads that exchange nothing",
        ["shape"],
        "direction",
        lambda row: f"{row['ratio'][1]:.2f}",
    ),
    "ranks": Pivot(
        "One float32 layer on each of several processes: milliseconds",
        ["ranks", "shape", "direction"],
        "variant",
        milliseconds,
    ),
    "steps": Pivot(
        "A training step under DistributedDataParallel: milliseconds (over plain batch norm's)",
        ["ranks", "network", "batch"],
        "variant",
        lambda row: f"{milliseconds(row)} ({row['ratio'][1]:.2f})",
    ),
    "shares": Pivot(
        "A step of syncbn.Shares over the plain program's: time (milliseconds), peak memory",
        ["network", "ranks"],
        "shares",
        lambda row: (
            f"{row['ratio']:.2f} ({number(row['milliseconds']['Shares'])}), "
            f"{row['memory_ratio']:.2f}"
        ),
    ),
    "jax": Pivot(
        "One float32 layer in JAX: milliseconds of ours / of flax's (ratio)",
        ["devices", "shape"],
        "direction",
        lambda row: (
            " / ".join(number(row["milliseconds"][n][1]) for n in ("syncbn", "flax"))
            + f" ({row['ratio'][1]:.2f})"
        ),
    ),
}


def pivot_table(results: dict, part: str) -> str:
    _, keys, column, cell, includes = PIVOTS[part]
    lines: dict[tuple, dict[str, str]] = {}
    for row in filter(includes, results.get(part, [])):
        key = tuple(shape_text(row[k]) if k == "shape" else str(row[k]) for k in keys)
        lines.setdefault(key, {})[str(row[column]).split(" (")[0]] = cell(row)
    columns = list(dict.fromkeys(c for line in lines.values() for c in line))
    rows = [[*key, *(line.get(c, "") for c in columns)] for key, line in lines.items()]
    head = [word.replace("_", " ") for word in (*keys, *columns)]
    return markdown(head, rows) if rows else "Not measured."


def machine_text(results: dict) -> str:
    """What was measured where, as a list."""
    m = results["machine"]
    caches = ", ".join(f"{name} {size // 1024:,} KiB" for name, size in m["caches"].items())
    lines = [
        f"Processor: {m['processor']}, {m['cores']} cores, {m['instruction_set']}; {caches}.",
        f"Versions: syncbn {m['syncbn']} (commit {m['commit']}), PyTorch {m['torch']}, "
        f"Python {m['python']}; {m['build'] or 'no C++ programs'}.",
        f"The {results['form']} run of {m['date']} took {results['seconds']} seconds. The load was "
        f"{m['load']:.1f} before it and {m['load_after']:.1f} after it.",
    ]
    later: dict[str, list[str]] = {}
    for part, run in results.get("later", {}).items():
        text = (
            f"were measured at {run['date']} (commit {run['commit']}) on {run['processor']}. The "
            f"load was {run['load']:.1f} before it and {run['load_after']:.1f} after it."
        )
        later.setdefault(text, []).append(f"`{part}`")
    lines += [f"The figures of {', '.join(parts)} {text}" for text, parts in later.items()]
    return "\n".join(f"- {line}" for line in lines)


def page(text: str, results: dict) -> str:
    """The text with its parts between the marks made anew."""

    def part(match: re.Match) -> str:
        makers = {"machine": machine_text, "targets": targets_table}
        name = match[1]
        made = makers[name](results) if name in makers else pivot_table(results, name)
        return f"<!-- {name}: made by benchmarks/report.py -->\n\n{made}\n\n<!-- end -->"

    pattern = r"<!-- (\w+): made by benchmarks/report.py -->.*?<!-- end -->"
    return re.sub(pattern, part, text, flags=re.DOTALL)


def draw(results: dict, path: Path) -> None:
    """Times over PyTorch's: a layer on one thread, and a training step. Quartiles are lines."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(3, 1, figsize=(11, 15), layout="constrained")

    def bars(plot, title: str, rows: list[tuple[str, str, list[float]]]) -> None:
        """rows: place on the axis, colour, quartiles."""
        places, colours = (list(dict.fromkeys(row[i] for row in rows)) for i in (0, 1))
        for i, colour in enumerate(colours):
            own = [(places.index(place), q) for place, c, q in rows if c == colour]
            x = [at + (i - (len(colours) - 1) / 2) * 0.8 / len(colours) for at, _ in own]
            errors = [[q[1] - q[0] for _, q in own], [q[2] - q[1] for _, q in own]]
            heights = [q[1] for _, q in own]
            style = {"error_kw": {"linewidth": 0.7}, "label": colour}
            plot.bar(x, heights, 0.8 / len(colours), yerr=errors, **style)
        plot.set_title(title)
        plot.set_ylabel("time / plain PyTorch's")
        slanted = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
        plot.set_xticks(range(len(places)), places, fontsize=8, **slanted)
        plot.axhline(1, color="gray", linewidth=0.5)
        plot.legend()

    for plot, direction in zip(axes, ("forward", "backward")):
        chosen = filter(case(threads=1, direction=direction), results["layers"])
        rows = [
            (
                f"{shape_text(r['shape'])} {r['layout']}",
                f"{r['dtype']}, {r['memory']} memory",
                r["ratios"]["PyTorch"],
            )
            for r in chosen
            if r["dtype"] != "float16"
        ]
        bars(plot, f"One layer's {direction}, one thread", rows)
    rows = [(f"{r['network']}, {r['batch']}", r["variant"], r["ratio"]) for r in results["steps"]]
    bars(axes[2], "A training step of 2 processes, by pictures a rank", rows)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def draw_curve(rows: list[dict], path: Path) -> None:
    """A rank's processor time and the time in all, by the number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    channels, engines = (list(dict.fromkeys(r[k] for r in rows)) for k in ("channels", "engine"))
    figure, axes = plt.subplots(
        1, max(1, len(channels)), figsize=(11, 4), sharey=True, squeeze=False, layout="constrained"
    )
    for plot, count in zip(axes[0], channels):
        for i, engine in enumerate(engines):
            own = [r for r in rows if (r["channels"], r["engine"]) == (count, engine)]
            ranks, style = [r["ranks"] for r in own], {"color": f"C{i}", "marker": "."}
            plot.plot(ranks, [r["processor"] for r in own], label=engine, **style)
            plot.plot(ranks, [r["microseconds"][1] for r in own], linestyle=":", alpha=0.5, **style)
        plot.set(title=f"{count} channels", xlabel="ranks", xscale="log", yscale="log")
        ticks = sorted({r["ranks"] for r in rows})
        plot.set_xticks(ticks, ticks)
        plot.minorticks_off()
        plot.legend(frameon=False)
    axes[0][0].set_ylabel("microseconds: of a rank's processor,\ndotted in all (median)")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def merged(stored: dict, results: dict, parts: list[str]) -> dict:
    """The stored results with these parts of a later run, and what is to be known of it."""
    known = ("processor", "commit", "date", "load", "load_after")
    run = {key: results["machine"][key] for key in known}
    later = stored.get("later", {}) | dict.fromkeys(parts, run)
    return stored | {"later": later} | {part: results[part] for part in parts}


def report(results: dict, path: Path) -> None:
    """path: the results'."""
    for part, pivot in PIVOTS.items():
        print(f"\n{pivot.title}\n\n{pivot_table(results, part)}")
    print(f"\n{machine_text(results)}\n\n{targets_table(results)}\n")
    plots = [path.with_suffix(".png"), path.with_name(f"{path.stem}_exchange.png")]
    if path == STORED:
        for path_of_page in PAGES:
            path_of_page.write_text(page(path_of_page.read_text(), results))
        plots = PLOTS
    try:
        draw(results, plots[0])
        draw_curve(results.get("curve", []), plots[1])
        print(f"results: {path}, plots: {plots[0]}, {plots[1]}")
    except ModuleNotFoundError as error:
        print(f"no plot: {error} (requirements/bench.txt has it)")


if __name__ == "__main__":
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else STORED
    report(json.loads(file.read_text()), file)
