# SPDX-License-Identifier: Apache-2.0
"""Draws docs/images/cpp_training.png from what examples/17_training.cpp prints.

python scripts/training_figure.py build/examples/examples/example_17_training
"""

import re
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

IMAGE = Path(__file__).resolve().parents[1] / "docs" / "images" / "cpp_training.png"
SAMPLES = (20, 100, 180)

printed = subprocess.run([sys.argv[1], "figure"], capture_output=True, text=True, check=True).stdout
figure, panels = plt.subplots(1, 2, figsize=(8, 3), sharey=True, layout="constrained")
for axes, part in zip(panels, re.split(r"(?=^\w+ statistics$)", printed, flags=re.M)[1:]):
    rows = re.findall(r"step +(\d+): loss \S+, accuracy of the ranks (\S+) (\S+) (\S+)", part)
    steps, *ranks = zip(*((float(number) for number in row) for row in rows))
    for samples, accuracy in zip(SAMPLES, ranks):
        axes.plot(steps, accuracy, label=f"rank with {samples} samples")
    axes.set(title=part.partition("\n")[0], xlabel="step")
panels[0].set_ylabel("accuracy on all samples")
panels[1].legend(frameon=False, loc="lower right")
figure.savefig(IMAGE)
