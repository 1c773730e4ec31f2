# SPDX-License-Identifier: Apache-2.0
"""Plain against synchronized batch norm, trained by real ranks. See README.md beside this file.

python examples/segmentation/main.py [--quick] [--ranks K] [--batch-per-rank B] [--data DIR]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from data import Source

# Before torch is imported: threads that wait sleep instead of spinning. When other programs use
# the cores too, spinning makes a step tens of times slower; when none does, little is lost.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

EPOCH_STEPS, QUICK_EPOCH_STEPS = 125, 20


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; --quick only changes defaults."""
    parser = argparse.ArgumentParser(
        description="Per-pixel classification with plain and with synchronized batch norm.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    positive = _positive_integer
    add("--ranks", type=positive, default=4, help="processes that train together")
    add("--batch-per-rank", type=positive, default=1, help="pictures a rank sees in one step")
    add(
        "--epochs",
        type=positive,
        default=8,
        help=f"epochs of {EPOCH_STEPS} steps (with --quick: of {QUICK_EPOCH_STEPS})",
    )
    add(
        "--norm",
        choices=("both", "plain", "sync"),
        default="both",
        help="batch norm on the ranks: (a) plain, (b) and (d) sync; (c) is always trained",
    )
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: CUDA and NCCL where every rank gets a device of its own, else CPU",
    )
    add("--data", type=Path, metavar="DIR", help="own pictures and masks, Pascal VOC layout")
    add("--size", type=positive, default=128, help="pixels a side that --data is cut to")
    add("--test-pictures", type=positive, default=200, help="held-out pictures, at most")
    add("--lr", type=float, default=3e-3, help="Adam's learning rate after the warm-up")
    add("--seed", type=int, default=0, help="of the first weights and the training pictures")
    add(
        "--out",
        type=Path,
        default=Path("demo-output"),
        metavar="DIR",
        help="folder for picture.png and results.json",
    )
    add(
        "--quick",
        action="store_true",
        help="a short form for CI: 2 ranks, 2 epochs, 40 test pictures unless given",
    )
    if parser.parse_args(arguments).quick:
        parser.set_defaults(ranks=2, epochs=2, test_pictures=40)
    options = parser.parse_args(arguments)
    if options.size % 4 or options.size < 16:
        parser.error("--size must be a multiple of 4, at least 16")
    if options.seed < 0 or options.lr <= 0:
        parser.error("--seed must not be negative, --lr must be positive")
    return options


def run(options: argparse.Namespace) -> int:
    """Everything; the exit status."""
    import torch

    began = time.perf_counter()
    try:
        import syncbn  # noqa: F401
    except ImportError as error:
        print(f"error: install the package syncbn first ({error})", file=sys.stderr)
        return 1

    import bits
    from figure import draw
    from ranks import RankFailed, choose_devices, run_on_ranks, threads_of
    from report import NOTES, bits_text, drift_text, measure, shares_text, table, write_json
    from train import Place, Plan, Setting, ranks_text, train

    ranks, batch = options.ranks, options.batch_per_rank
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        devices, backend, where = choose_devices(options.device, ranks)
        source = _source(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    plan = Plan(
        ranks=ranks,
        batch_per_rank=batch,
        epochs=options.epochs,
        steps_per_epoch=QUICK_EPOCH_STEPS if options.quick else EPOCH_STEPS,
        learning_rate=options.lr,
        seed=options.seed,
    )
    torch.set_num_threads(threads_of(ranks))

    settings = [
        Setting("a", "plain", ranks, f"(a) plain, {ranks_text(ranks)} x {batch}"),
        Setting("b", "sync", ranks, f"(b) synchronized, {ranks_text(ranks)} x {batch}"),
        Setting("c", "shares", 1, f"(c) one rank, {ranks} shares x {batch}"),
        Setting("d", "shares", ranks, f"(d) by shares, {ranks_text(ranks)} x {batch}"),
    ]
    chosen = {"both": "abcd", "plain": "ac", "sync": "bcd"}[options.norm]
    settings = [s for s in settings if s.key in chosen]
    print(
        f"{source.num_classes} classes; {plan.epochs} epochs of {plan.steps_per_epoch} steps, "
        f"{plan.global_batch} pictures a step\n{where}",
        flush=True,
    )

    # The same weights, pictures and schedule for all settings; only normalization differs.
    case = bits.make_case(plan, source) if options.norm != "plain" else None
    on_ranks = [s for s in settings if s.key != "c"]
    try:
        runs, parts = run_on_ranks(plan, on_ranks, source, case, devices, backend)
    except RankFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    alone = Place(0, 1, torch.device(devices[0]))
    (setting,) = (s for s in settings if s.key == "c")
    runs["c"] = train(setting, plan, source, alone)

    test = source.test_pictures()
    outcomes = [measure(s, runs[s.key], plan, source, test) for s in settings]
    rows, control = [], None
    if case is not None:
        rows = bits.compare(parts, bits.run_layer(case, 0, plan.global_batch, alone.device))
        control = bits.ordinary_merge(case, ranks)
    picture, numbers = options.out / "picture.png", options.out / "results.json"
    draw(picture, plan, source, outcomes, test)
    write_json(numbers, plan, where, outcomes, rows, control)

    texts = [table(outcomes, len(test[0]))]
    if control is not None:
        texts.append(bits_text(rows, control, ranks))
    seconds = time.perf_counter() - began
    if "d" in runs:
        texts.append(shares_text(runs, plan))
    texts += [drift_text(outcomes), NOTES, f"Wrote {picture} and {numbers} ({seconds:.0f} s)"]
    print("\n" + "\n\n".join(texts), flush=True)
    differing = [f"the first layer's {row.quantity}" for row in rows if row.differing]
    if "d" in runs and runs["d"].fingerprint != runs["c"].fingerprint:
        differing.append("the network by shares")
    if differing:
        print(
            f"FAILED: {', '.join(differing)}: not the same bits on {ranks_text(ranks)} as on one.",
            file=sys.stderr,
        )
        return 1
    return 0


def _source(options: argparse.Namespace) -> Source:
    """The pictures: the user's own, or digits over photographs."""
    if options.data:
        from folder import VocFolder

        return VocFolder(options.data, options.test_pictures, options.size)
    from data import DigitsOnPhotos

    return DigitsOnPhotos(options.test_pictures)


def _positive_integer(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


if __name__ == "__main__":
    try:
        sys.exit(run(parse_arguments()))
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
