# SPDX-License-Identifier: Apache-2.0
"""Plain against synchronized batch norm, over learning rates and seeds.

python examples/segmentation/compare.py [--boxes] [--rates X...] [--seeds N] [--steps N]

Trains the demo's network, or with --boxes its detector, on real ranks with one picture each. The
exit status is 1 if a loss does not fall, or if synchronized ranks end with different bits.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from statistics import fmean

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as main.py

NAMES = {"plain": "plain", "sync": "synchronized"}


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    add("--boxes", action="store_true", help="detect digits, in place of a class for each pixel")
    add("--rates", type=float, nargs="+", default=[1.0], help="times --lr, each for all seeds")
    add("--seeds", type=int, default=3, help="0, 1, ...: of first weights and pictures")
    add("--steps", type=int, default=500, help="at least 8")
    add("--ranks", type=int, default=4)
    add("--lr", type=float, default=3e-3)
    add("--width", type=int, default=24, help="channels of the network; the demo's has 48")
    add("--test-pictures", type=int, default=200)
    return parser.parse_args()


def main() -> int:
    """The exit status."""
    from data import DigitsOnPhotos
    from detector import BoxesOfDigits
    from ranks import run_on_ranks
    from report import own_statistics
    from train import Plan, Setting

    options = parse_arguments()
    ranks, steps = options.ranks, options.steps
    source = (BoxesOfDigits if options.boxes else DigitsOnPhotos)(options.test_pictures)
    source.width = options.width
    lines = list(itertools.product(options.rates, NAMES))
    settings = [
        Setting(
            f"{rate}_{norm}_{seed}",
            norm,
            ranks,
            f"rate x {rate:g}, {NAMES[norm]}, seed {seed}",
            Plan(ranks, 1, 1, steps, rate * options.lr, seed),
        )
        for seed, (rate, norm) in itertools.product(range(options.seeds), lines)
    ]
    runs, _ = run_on_ranks(settings[0].plan, settings, source, None, ["cpu"] * ranks, "gloo")
    test = source.test_pictures()
    measure = "Mean AP" if options.boxes else "Mean IoU"
    print(
        f"{ranks} ranks with one picture each, {steps} steps; mean and range of {options.seeds} "
        f"seeds\n\n| Learning rate | Batch norm | Training loss | Test loss | {measure} "
        "| With own statistics |\n|---|---|---|---|---|---|"
    )
    for rate, norm in lines:
        found = [runs[f"{rate}_{norm}_{seed}"] for seed in range(options.seeds)]
        columns = [[ends(run.losses)[1] for run in found]]
        columns += [[run.evaluations[-1][name] for run in found] for name in ("loss", "quality")]
        columns += [[own_statistics(run, source, test) for run in found]]
        print(f"| × {rate:g} | {NAMES[norm]} | {' | '.join(map(spread, columns))} |", flush=True)
    losses = [run.losses for run in runs.values()]
    most = {norm: max(runs[s.key].models for s in settings if s.norm == norm) for norm in NAMES}
    print(f"\nDifferent models at the end: plain {most['plain']}, synchronized {most['sync']}")
    return int(most["sync"] > 1 or any(first <= last for first, last in map(ends, losses)))


def ends(losses: list[float]) -> tuple[float, float]:
    """The means over the first and the last eighth of the steps."""
    eighth = len(losses) // 8
    return fmean(losses[:eighth]), fmean(losses[-eighth:])


def spread(values: list[float]) -> str:
    """Their mean, lowest and highest."""
    return f"{fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    sys.exit(main())
