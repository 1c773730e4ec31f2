# SPDX-License-Identifier: Apache-2.0
"""Draws the training losses of other libraries' loops, longer than the tests run them: plain batch
norm on two ranks, this package's on the same ranks, and one process with the whole batch.

    python tests/python/interop/curves.py docs/images/training_loops.png
"""

import functools
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.update(LOOPS_STEPS="40", SYNCBN_INTEROP="all")  # before training_loops reads them
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch

import training_loops
from rank_runs import check_case, run_cases

TITLES = {
    "loop_segmentation": "torchvision, segmentation",
    "loop_timm": "timm",
    "loop_lightning": "Lightning",
    "loop_accelerate": "Accelerate",
    "loop_transformers": "transformers",
}
#: Number of ranks, kind, and how the line looks.
LINES = {
    "plain, two ranks": (2, "plain", {"color": "#c8553d"}),
    "synchronized, two ranks": (2, "synchronized", {"color": "#1f6f8b", "linewidth": 2.5}),
    "plain, one process with all samples": (1, "plain", {"color": "#222222", "linestyle": ":"}),
}
WINDOW = 5


def run(case, path: Path, rank: int, world: int) -> None:
    training_loops.LOSSES.clear()
    case(rank, world)
    torch.save(training_loops.LOSSES, f"{path}.{world}.{rank}")


def cases(folder: Path, kinds: tuple[str, ...]) -> dict:
    found = training_loops.cases(folder, kinds)
    wanted = {f"{name} {kind}" for name in TITLES for kind in kinds}
    return {k: functools.partial(run, v, folder / k) for k, v in found.items() if k in wanted}


def losses(folder: Path, name: str, world: int, kind: str) -> torch.Tensor:
    """The mean over ranks, which have equally many samples."""
    files = [f"{folder / name} {kind}.{world}.{rank}" for rank in range(world)]
    return torch.tensor([torch.load(file) for file in files], dtype=torch.float64).mean(0)


def draw(folder: Path, out: Path) -> None:
    figure, panels = plt.subplots(2, 3, figsize=(10, 5), layout="constrained")
    for axes, (name, title) in zip(panels.flat, TITLES.items()):
        curves = {label: losses(folder, name, *line[:2]) for label, line in LINES.items()}
        for label, curve in curves.items():
            smooth = curve.unfold(0, WINDOW, 1).mean(1)
            axes.plot(range(WINDOW, len(curve) + 1), smooth, label=label, **LINES[label][2])
        plain, ours, whole = curves.values()
        apart = [(curve - whole).abs().max().item() for curve in (plain, ours)]
        axes.set(title=f"{title}\napart by {apart[0]:.2f} (plain), {apart[1]:.0e}", xlabel="step")
        print(f"{title}: plain {apart[0]:.3f}, synchronized {apart[1]:.1e}", flush=True)
    panels[0, 0].set_ylabel("training loss, mean of 5 steps")
    panels[1, 2].axis("off")
    panels[1, 2].legend(*panels[0, 0].get_legend_handles_labels(), frameon=False, loc="center")
    figure.savefig(out)


def main() -> None:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for world, kinds in ((1, ("plain",)), (2, ("plain", "synchronized"))):
            ranks = folder / str(world)
            ranks.mkdir()
            load = functools.partial(cases, folder, kinds)
            outcomes = run_cases(load, world, "shared memory", ranks, 600)
            for case in load():
                check_case(outcomes, case)
        draw(folder, Path(sys.argv[1]))
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
