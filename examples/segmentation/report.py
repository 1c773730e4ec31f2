# SPDX-License-Identifier: Apache-2.0
"""What came out: the table, the comparisons, the picture, results.json."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from bits import Comparison
from data import Source
from train import Plan, Run, Setting, predict, ranks_text


@dataclass
class Outcome:
    """One setting after its last step, with what was measured on the held-out pictures."""

    setting: Setting
    run: Run
    predictions: Tensor  # (N, H, W), with running statistics
    own_statistics_iou: float  # every picture normalized with its own statistics instead

    @property
    def train_loss(self) -> float:
        """Mean over the last epoch."""
        steps = self.run.evaluations[-1]["step"] // len(self.run.evaluations)
        return statistics.fmean(self.run.losses[-int(steps) :])

    def step_milliseconds(self) -> tuple[float, float, float]:
        """(median, 10th and 90th percentile) of forward, backward and update."""
        times = sorted(1e3 * seconds for seconds in self.run.step_seconds)
        tenth = len(times) // 10
        return statistics.median(times), times[tenth], times[-1 - tenth]


def measure(setting: Setting, run: Run, plan: Plan, source: Source, test: tuple) -> Outcome:
    """Predictions of the trained network, on the CPU and in plain batch norm layers."""
    network = source.build_network(plan.seed)
    network.load_state_dict(run.state)
    network.eval()
    predictions = predict(network, test[0]).argmax(1)
    return Outcome(setting, run, predictions, own_statistics(run, source, test))


def own_statistics(run: Run, source: Source, test: tuple) -> float:
    """The quality where each picture is normalized by itself."""
    network = source.build_network(0).eval()
    network.load_state_dict(run.state)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.train()
    return source.quality(predict(network, test[0], batch=1), test[1])


def table(outcomes: list[Outcome], num_test: int) -> str:
    """One line a setting; always the last step, never the best."""
    head = (
        f"{'':<33} {'training':>9} {'test':>7} {'test':>7} {'IoU, own':>10}   {'ms a step':<20}\n"
        f"{f'last step, {num_test} test pictures':<33} {'loss':>9} {'loss':>7} {'IoU':>7} "
        f"{'statistics':>10}   median (10 %..90 %)"
    )
    lines = [head, "-" * 96]
    for outcome in outcomes:
        last = outcome.run.evaluations[-1]
        median, low, high = outcome.step_milliseconds()
        lines.append(
            f"{outcome.setting.title:<33} {outcome.train_loss:>9.4f} {last['loss']:>7.4f} "
            f"{last['quality']:>7.3f} {outcome.own_statistics_iou:>10.3f}   "
            f"{median:.1f} ({low:.1f}..{high:.1f})"
        )
    return "\n".join(lines)


def bits_text(rows: list[Comparison], control: Comparison, ranks: int) -> str:
    """The comparison of the first layer's bits."""
    lines = [f"The first layer on identical inputs, {ranks_text(ranks)} against one:"]
    for row in rows:
        verdict = (
            "same bits"
            if row.differing == 0
            else f"{row.differing} DIFFER, by up to {row.largest:.1e}"
        )
        lines.append(f"  {row.quantity:<15} {row.numbers:>9,} numbers   {verdict}")
    lines.append(
        f"  (control: float32 variances of {ranks} parts, merged in float32, differ from the "
        f"whole's\n  in {control.differing} of {control.numbers} channels)"
    )
    return "\n".join(lines)


def shares_text(runs: dict[str, Run], plan: Plan) -> str:
    """The whole networks of (c) and (d)."""
    one, many = (runs[key].fingerprint for key in "cd")
    verdict = f"same bits ({one[:16]}...)" if one == many else f"DIFFERENT ({one}, {many})"
    return (
        f"The whole network and the optimizer after {plan.steps:,} steps by shares, (d) on "
        f"{ranks_text(plan.ranks)} and (c) on one:\n  {verdict}"
    )


def drift(runs: dict[str, Run], key: str) -> dict[int, float]:
    """step -> |w - w_c| / |w_c| over all parameters, of setting `key` against (c)."""
    return {
        step: float((weights - runs["c"].weights[step]).norm() / runs["c"].weights[step].norm())
        for step, weights in runs[key].weights.items()
    }


def drift_text(outcomes: list[Outcome]) -> str:
    """How far whole networks are from (c)'s; rounding elsewhere grows, so this is not zero."""
    runs = {outcome.setting.key: outcome.run for outcome in outcomes}
    reference = next(o for o in outcomes if o.setting.key == "c")
    lines = ["The other networks against (c), |w - w_c| / |w_c|:"]
    for outcome in outcomes:
        key = outcome.setting.key
        if key in "cd":
            continue
        steps = drift(runs, key)
        shown = sorted(steps)[:2] + sorted(steps)[-1:]
        values = ", ".join(f"step {s}: {steps[s]:.1e}" for s in dict.fromkeys(shown))
        agree = float((outcome.predictions == reference.predictions).double().mean())
        lines.append(f"  ({key})  {values}; {100 * agree:.2f} % of test pixels predicted alike")
    return "\n".join(lines)


NOTES = """\
How to read this. In training, a picture is normalized with the statistics of the pictures beside
it: those of its own rank in (a), those of all ranks in the others. A deployed network uses running
statistics instead: 'test IoU'. Where these do not match what a rank trained with, evaluation pays
for it however well training went; compare the training losses and the column 'own statistics'
(every test picture normalized by itself). With running statistics, synchronizing keeps training and
evaluation consistent; this does not show that it trains better, and with more pictures per rank
(--batch-per-rank) there is less to gain. One run with one seed: other seeds (--seed) move the IoU
by about 0.02. IoU is the mean over the classes. DistributedDataParallel adds gradients in another
order than shares do, and training amplifies the rounding: (b) is not (c), and (d) is."""


def write_json(
    path: Path,
    plan: Plan,
    where: str,
    outcomes: list[Outcome],
    bits: list[Comparison],
    control: Comparison | None,
) -> None:
    """Everything that was printed or drawn, as numbers."""
    runs = {outcome.setting.key: outcome.run for outcome in outcomes}
    result = {
        "plan": asdict(plan),
        "where": where,
        "torch": torch.__version__,
        "same_bits": [asdict(row) for row in bits],
        "control_float32_merge": asdict(control) if control else None,
        "settings": {
            outcome.setting.key: {
                "title": outcome.setting.title,
                "train_loss_last_epoch": outcome.train_loss,
                "own_statistics_mean_iou": outcome.own_statistics_iou,
                "evaluations": outcome.run.evaluations,
                "step_milliseconds_median_p10_p90": outcome.step_milliseconds(),
                "seconds": outcome.run.seconds,
                "fingerprint": outcome.run.fingerprint,
                "distance_from_c": drift(runs, outcome.setting.key),
                "losses": outcome.run.losses,
            }
            for outcome in outcomes
        },
    }
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
