# SPDX-License-Identifier: Apache-2.0
"""The picture: learning curves, and test pictures beside their truth and the predictions."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
from torch import Tensor

from data import Source, denormalize
from network import IGNORE
from report import Outcome
from train import Plan, ranks_text

_SHOWN = 6  # the first test pictures, not chosen ones
_LINES = {"a": "#c8553d", "b": "#1f6f8b", "c": "#222222", "d": "#b9dcb5"}
_STYLES = {"a": "-", "b": "-", "c": (0, (1.2, 1.6)), "d": "-"}  # (c) dotted, on (d), near (b)
_VOID = (1.0, 1.0, 1.0)


def draw(
    path: Path, plan: Plan, source: Source, outcomes: list[Outcome], test: tuple[Tensor, Tensor]
) -> None:
    """Writes the picture as PNG."""
    pictures, labels = test
    shown = min(_SHOWN, len(pictures))
    rows = [("picture", None), ("truth", labels)] + [
        (f"({o.setting.key}) {_short(o)}", o.predictions) for o in outcomes if o.setting.key in "ab"
    ]
    figure = plt.figure(figsize=(11.0, 5.0 + 1.72 * len(rows)), dpi=130, facecolor="white")
    upper, lower = figure.subfigures(2, 1, height_ratios=(4.4, 0.6 + 1.72 * len(rows)))

    left, right = upper.subplots(1, 2)
    upper.subplots_adjust(left=0.07, right=0.98, top=0.80, bottom=0.15, wspace=0.2)
    upper.suptitle(
        "Per-pixel classification with small batches per device: "
        f"{ranks_text(plan.ranks)} × {plan.batch_per_rank}, {plan.steps} steps",
        fontsize=13,
        y=0.975,
    )
    for outcome in outcomes:
        _draw_curves(left, right, outcome, plan)
    left.set_title("mean IoU on held-out pictures, with running statistics", fontsize=10.5)
    right.set_title(f"training loss, mean of {_window(plan)} steps", fontsize=10.5)
    right.set_yscale("log")
    right.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    right.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    right.yaxis.set_minor_formatter(NullFormatter())
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.set_xlim(0, plan.steps)
        axes.grid(alpha=0.25, which="both", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    left.set_ylim(bottom=0.0)
    left.legend(frameon=False, fontsize=9, loc="best")

    grid = lower.subplots(len(rows), shown, squeeze=False)
    lower.subplots_adjust(left=0.07, right=0.98, top=0.95, bottom=0.09, wspace=0.06, hspace=0.06)
    lower.suptitle(f"the first {shown} test pictures", fontsize=10.5, y=0.99)
    colours = _palette(source.num_classes)
    for (name, maps), axes_row in zip(rows, grid):
        axes_row[0].set_ylabel(name, fontsize=10)
        for index, axes in enumerate(axes_row):
            if maps is None:
                image = denormalize(pictures[index]).permute(1, 2, 0).numpy()
            else:
                image = _paint(maps[index].numpy(), colours)
            axes.imshow(image, interpolation="nearest")
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines[:].set_visible(False)
    names = source.class_names[:22]
    lower.legend(
        handles=[Patch(color=colours[i], label=name) for i, name in enumerate(names)],
        loc="lower center",
        ncols=min(len(names), 11),
        frameon=False,
        fontsize=9,
        handlelength=1.0,
        columnspacing=1.4,
    )
    figure.savefig(path)
    plt.close(figure)


def _short(outcome: Outcome) -> str:
    return "plain" if outcome.setting.norm == "plain" else "synchronized"


def _window(plan: Plan) -> int:
    return max(1, min(25, plan.steps // 20))


def _draw_curves(left: Axes, right: Axes, outcome: Outcome, plan: Plan) -> None:
    key = outcome.setting.key
    style = {"color": _LINES[key], "linestyle": _STYLES[key], "linewidth": 2.0}
    if key == "d":  # below (c), whose numbers it has
        style |= {"linewidth": 6.0, "zorder": 1.5}
    steps = [evaluation["step"] for evaluation in outcome.run.evaluations]
    ious = [evaluation["quality"] for evaluation in outcome.run.evaluations]
    label = f"{outcome.setting.title}: {ious[-1]:.3f}".replace(" x ", " × ")
    left.plot(steps, ious, marker="o", markersize=4, clip_on=False, label=label, **style)
    losses = np.asarray(outcome.run.losses)
    window = _window(plan)
    smooth = np.convolve(losses, np.full(window, 1.0 / window), mode="valid")
    right.plot(np.arange(window, len(losses) + 1), smooth, **style)


def _palette(num_classes: int) -> np.ndarray:
    """(num_classes, 3) in 0..1; the first class, the background, is dark."""
    wheel = plt.get_cmap("tab10" if num_classes <= 11 else "tab20").colors
    colours = [wheel[i % len(wheel)] for i in range(num_classes - 1)]
    return np.array([(0.13, 0.13, 0.16), *colours])


def _paint(labels: np.ndarray, colours: np.ndarray) -> np.ndarray:
    """(H, W) labels to (H, W, 3) colours; pixels marked IGNORE are white."""
    image = colours[np.where(labels == IGNORE, 0, labels)]
    image[labels == IGNORE] = _VOID
    return image
