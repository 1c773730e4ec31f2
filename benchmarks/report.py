"""The table of the passes and the plot of a suite's results.

python benchmarks/report.py RESULTS.json     prints the one and draws the other beside the file
"""

import json
import sys
from pathlib import Path

PASSES = (
    ("forward", ("local_moments", "finalize_moments", "normalize")),
    ("backward", ("local_gradients", "finalize_gradients", "input_gradient")),
)
HEADING = """\
The passes' times, in times the fastest copy of the input in the same run (medians).
forward = moments + finalize + normalize, at least 1.5 where memory bounds it;
backward = gradients + finalize + input gradient, at least 2.5. fresh: in fresh output memory.
shape          dtype     layout         threads | copy GB/s | forward = mom. + fin. + norm.  fresh\
 | backward = grad. + fin. + inp.  fresh"""


def passes_table(rows: list[dict]) -> str:
    lines = [HEADING]
    cases: dict[tuple, dict] = {}
    for row in rows:
        case = cases.setdefault(tuple(row[k] for k in ("shape", "dtype", "layout", "threads")), {})
        case["copy" if row["pass"].startswith("copy") else row["pass"], row["memory"]] = row
    for (shape, dtype, layout, threads), case in cases.items():

        def ratio(name: str, memory: str = "reused", case=case) -> float:
            return case[name, memory]["times_copy"][1]

        line = f"{shape:14} {dtype:9} {layout:14} {threads:7} | "
        line += f"{case['copy', 'reused']['gigabytes_per_second']:9.1f}"
        for name, parts in PASSES:
            line += f" | {ratio(name):8.2f} ="
            line += " + ".join(f"{ratio(part):5.2f}" for part in parts)
            line += f"  {ratio(name, 'fresh'):5.2f}"
        lines.append(line)
    return "\n".join(lines)


def draw(results: dict, path: Path) -> None:
    """One thread, float32: a layer against others and the copy; a training step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(3, 1, figsize=(11, 13), layout="constrained")
    machine = results["machine"]
    figure.suptitle(
        f"syncbn {machine['syncbn']}, PyTorch {machine['torch']}; {machine['processor']}"
    )
    chosen = {"threads": 1, "dtype": "float32", "memory": "fresh"}
    rows = [r for r in results["layers"] if all(r[k] == v for k, v in chosen.items())]
    cases = list(dict.fromkeys((r["shape"], r["layout"]) for r in rows))
    time = {(r["shape"], r["layout"], r["variant"]): r["milliseconds"] for r in rows}
    for plot, direction in zip(axes, ("forward", "backward")):
        for i, name in enumerate(("syncbn", "PyTorch", "oneDNN")):
            own = f"{name} {direction}"
            where = [at for at, case in enumerate(cases) if (*case, own) in time]
            scale = [time[(*cases[at], "copy to new memory")][1] for at in where]
            times = [time[(*cases[at], own)] for at in where]
            bars(plot, where, i, 3, times, scale, name)
        plot.set_title(f"One layer's {direction}: float32, one thread, fresh memory")
        plot.set_ylabel("time / copy to fresh memory")
        plot.set_xticks(range(len(cases)), [f"{s}\n{x}" for s, x in cases], fontsize=6)
        plot.axhline(1, color="gray", linewidth=0.5)
        plot.legend()
    steps = results["steps"]
    cases = list(dict.fromkeys((r["network"], r["batch"]) for r in steps))
    names = list(dict.fromkeys(r["variant"] for r in steps))
    for i, name in enumerate(names):
        own = [r for r in steps if r["variant"] == name]
        plain = [r for r in steps if r["variant"] == names[0]]
        times = [r["milliseconds"] for r in own]
        scale = [r["milliseconds"][1] for r in plain]
        bars(axes[2], list(range(len(cases))), i, len(names), times, scale, name)
    axes[2].set_title("A training step of 2 processes")
    axes[2].set_ylabel("time / the network that is not synchronized")
    axes[2].set_xticks(range(len(cases)), [f"{n}, batch {b}" for n, b in cases])
    axes[2].legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def bars(plot, places, index, of, times, scale, name) -> None:
    """Medians, with the quartiles as error bars."""
    width = 0.8 / of
    medians = [t[1] / s for t, s in zip(times, scale)]
    errors = [[(t[1] - t[0]) / s for t, s in zip(times, scale)]]
    errors.append([(t[2] - t[1]) / s for t, s in zip(times, scale)])
    where = [p + (index - (of - 1) / 2) * width for p in places]
    plot.bar(where, medians, width, yerr=errors, error_kw={"linewidth": 0.7}, label=name)


def report(results: dict, path: Path) -> None:
    """path: the plot's."""
    if results["passes"] is not None:
        print("\n" + passes_table(results["passes"]["passes"]))
    try:
        draw(results, path)
        print(f"\nplot: {path}")
    except ModuleNotFoundError as error:
        print(f"\nno plot: {error} (requirements/bench.txt has it)")


if __name__ == "__main__":
    file = Path(sys.argv[1])
    report(json.loads(file.read_text()), file.with_suffix(".png"))
