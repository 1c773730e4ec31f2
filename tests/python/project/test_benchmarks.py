# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' harness: what a run writes, and what it refuses. No time's size is looked at.

torch.nn.SyncBatchNorm is nowhere beside these: it refuses tensors on the CPU.
"""

import json
import os
import re
import subprocess
import sys

import pytest

from support import PROJECT

BENCHMARKS = PROJECT / "benchmarks"
sys.path.append(str(BENCHMARKS))

import report  # noqa: E402


def python(*command: object, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_quartiles(values: list[float]) -> None:
    low, median, high = values
    assert 0 < low <= median <= high


def names(rows: list[dict], *keys: str) -> set[tuple]:
    return {tuple(row[key] for key in keys) for row in rows}


@pytest.mark.weekly
def test_suite_writes_every_field(tmp_path):
    # A package that cannot be imported stands for one that is not installed.
    absent = tmp_path / "absent" / "matplotlib.py"
    absent.parent.mkdir()
    absent.write_text("raise ModuleNotFoundError('No module named matplotlib')\n")
    paths = [str(absent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    file = tmp_path / "results.json"
    options = ["--tiny", "--programs", tmp_path / "none", "--out", file]
    text = python(BENCHMARKS / "suite.py", *options, PYTHONPATH=os.pathsep.join(paths))
    assert "bench_passes is not built (make bench-cpp): not measured" in text
    assert "no plot: No module named matplotlib (requirements/bench.txt has it)" in text

    results = json.loads(file.read_text())
    assert set(results) == {
        *("format", "form", "seconds", "machine"),
        *("passes", "exchange", "curve", "threads", "layers", "welford", "ranks"),
        *("steps", "jax"),
    }
    assert results["format"] == 2 and results["form"] == "tiny"
    assert results["passes"] == results["threads"] == results["curve"] == []
    assert set(results["machine"]) == {
        *("processor", "cores", "caches", "platform", "python", "torch", "syncbn", "commit"),
        *("build", "instruction_set", "date", "load", "load_after"),
    }

    for part in ("exchange", "layers", "welford", "jax", "ranks", "steps"):
        assert results[part], part
        for row in results[part]:
            times = row.get("milliseconds") or row["microseconds"]
            for values in times.values() if isinstance(times, dict) else [times]:
                check_quartiles(values)

    pytest.importorskip("matplotlib")
    python(BENCHMARKS / "report.py", file)
    for plot in (file.with_suffix(".png"), file.with_name("results_exchange.png")):
        assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_part_that_is_measured_alone_leaves_the_others():
    """And the page says when it was measured."""
    stored = json.loads(report.STORED.read_text(encoding="utf-8"))
    row = {"engine": "threads", "ranks": 2, "channels": 64, "processor": 1}
    rows = [row | {"microseconds": [2, 2, 2]}]
    again = stored["machine"] | {"commit": "abcdef0", "load": 0.25}
    results = report.merged(stored, {"machine": again, "curve": rows, "steps": []}, ["curve"])
    assert results["curve"] == rows and results["steps"] == stored["steps"] != []
    assert results["machine"] == stored["machine"]
    assert re.search(r"\| 64 +\| threads \| 1 / 2 \|", report.pivot_table(results, "curve"))
    told = f"`curve` were measured at {again['date']} (commit abcdef0) on {again['processor']}"
    assert told in report.machine_text(results)


def test_pages_are_made_of_the_stored_results():
    texts = [path.read_text(encoding="utf-8") for path in report.PAGES]
    results = json.loads(report.STORED.read_text(encoding="utf-8"))
    for text in texts:
        assert text == report.page(text, results), "python benchmarks/report.py makes it anew"
        emptied = re.sub(r"(report\.py -->).*?(<!-- end)", r"\1\2", text, flags=re.DOTALL)
        assert len(emptied) < len(text) and report.page(emptied, results) == text
    for part in ("machine", "targets", "passes", "steps", "exchange", "curve", "welford"):
        assert f"<!-- {part}: made by benchmarks/report.py -->" in "".join(texts)
    assert all(plot.exists() for plot in report.PLOTS)
