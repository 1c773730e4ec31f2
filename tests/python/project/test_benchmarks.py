"""The benchmarks' harness: what a run writes, and what it refuses. No time's size is looked at.

torch.nn.SyncBatchNorm is nowhere beside these: it refuses tensors on the CPU.
"""

import itertools
import json
import os
import subprocess
import sys

import pytest

from support import PROJECT

BENCHMARKS = PROJECT / "benchmarks"
sys.path.append(str(BENCHMARKS))
import count  # noqa: E402

PROFILE = "version: 1\ndesc: Trigger: Client Request: {}\n\nfn=(1) f\n7 5\n\ntotals: {}\n"
COUNTED = {"build": "g++", "instruction set": "avx2", "instructions": {"a": 1000, "b": 2000}}


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


def check_row(row: dict) -> None:
    low, median, high = row["milliseconds"]
    assert 0 < low <= median <= high and row["rounds"] >= 2
    if "base" in row:
        low, median, high = row["speedup"]
        assert 0 < low <= median <= high
        assert row["base"] != row["variant"] or (low, high) == (1, 1)


def names(rows: list[dict], *keys: str) -> set[tuple]:
    return {tuple(row[key] for key in keys) for row in rows}


def test_suite_writes_every_field(tmp_path):
    # A package that cannot be imported stands for one that is not installed.
    absent = tmp_path / "absent" / "matplotlib.py"
    absent.parent.mkdir()
    absent.write_text("raise ModuleNotFoundError('No module named matplotlib')\n")
    paths = [str(absent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    options = ["--tiny", "--programs", tmp_path / "none", "--out", tmp_path]
    text = python(BENCHMARKS / "suite.py", *options, PYTHONPATH=os.pathsep.join(paths))
    assert "has no bench_passes (make bench-cpp)" in text
    assert "no plot: No module named matplotlib (requirements/bench.txt has it)" in text

    [file] = tmp_path.glob("cpu-*.json")
    results = json.loads(file.read_text())
    assert set(results) == {
        *("format", "form", "seconds", "machine"),
        *("passes", "exchange", "threads", "layers", "ranks", "steps"),
    }
    assert results["format"] == 1 and results["form"] == "tiny"
    assert results["passes"] is None and results["threads"] == []
    assert set(results["machine"]) == {
        *("processor", "cores", "platform", "python", "torch", "syncbn", "commit"),
        *("instruction_set", "date", "load", "load_after"),
    }

    engines = {("Gloo", 2, 64, 9792), ("Gloo", 2, 512, 77888), ("Gloo", 2, 2048, 311360)}
    assert names(results["exchange"], "engine", "ranks", "channels", "bytes") == engines
    for row in results["exchange"]:
        assert 0 < row["microseconds"][0] <= row["microseconds"][2] <= row["p99"]

    directions = ("forward", "backward")
    for row in results["layers"] + results["ranks"] + results["steps"]:
        check_row(row)
    places = ["memory", "threads", "shape", "dtype", "layout"]
    variants = {f"{n} {d}" for n in ("syncbn", "PyTorch") for d in directions}
    variants |= {"copy", "copy to new memory"}
    expected = itertools.product(
        ("fresh", "reused"),
        [1],
        ["2x8x3x5"],
        ("float32", "bfloat16"),
        ("contiguous", "channels-last"),
        variants,
    )
    # oneDNN comes on top where this PyTorch has it.
    onednn = {"oneDNN forward", "oneDNN backward"}
    rows = [row for row in results["layers"] if row["variant"] not in onednn]
    assert names(rows, *places, "variant") == set(expected)

    layers = ["BatchNorm, not synchronized", "recipe, Gloo"]
    layers += ["syncbn, Gloo", "syncbn, shared memory"]
    variants = {f"{layer}: {direction}" for layer in layers for direction in directions}
    expected = itertools.product([2], ["2x8x3x5"], variants)
    assert names(results["ranks"], "ranks", "shape", "variant") == set(expected)
    variants = {"BatchNorm2d, not synchronized", "syncbn, not synchronized", *layers[1:]}
    expected = itertools.product([2], ["ResNet-20"], [1], variants)
    assert names(results["steps"], "ranks", "network", "batch", "variant") == set(expected)

    pytest.importorskip("matplotlib")
    python(BENCHMARKS / "report.py", file)
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_shapes_are_those_that_docs_name():
    shapes = [[int(n) for n in line.split("x")] for line in (BENCHMARKS / "shapes.txt").open()]
    assert sorted(shapes) == sorted(
        [[8, 64, 56, 56], [2, 256, 128, 128], [16, 512, 14, 14], [32, 2048, 7, 7]]
        + [[2, 2048, 32, 32], [64, 2048], [4096, 2048], [2, 64, 8, 56, 56]]
    )


def test_memory_is_fresh_or_reused():
    """Page faults of allocations of 8 MiB: one or more per huge page, or next to none, once the
    allocator's cache of small pieces (seven of each size) is full."""
    script = f"""if True:
        import resource, sys
        sys.path.append({str(BENCHMARKS)!r})
        import torch
        import bench_layer

        def faults():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            torch.ones(1 << 21)
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

        for kind in bench_layer.MEMORY:
            bench_layer.use_memory(kind)
            torch.ones(1 << 21)
            print(kind, min(faults() for _ in range(12)))
    """
    fresh, reused = python("-c", script).splitlines()
    assert fresh.startswith("fresh ") and int(fresh.split()[1]) >= 4
    assert reused.startswith("reused ") and int(reused.split()[1]) < 4


def test_counts_are_read_and_compared():
    assert count.parse_profile(PROFILE.format("a|b", 12)) == ("a|b", 12)
    with pytest.raises(SystemExit, match="expected a label and a total"):
        count.parse_profile("totals: 12\n")
    stored = COUNTED | {"instructions": {"a": 1000, "b": 2000}}
    assert count.compare(COUNTED, stored) == ([], [])
    # The limit is 5 %, and it does not count as slower if there is less to do.
    for counts, expected in (
        ({"a": 1050, "b": 1900}, ([], [])),
        ({"a": 1051, "b": 2000}, (["a: 1,000 -> 1,051 (+5.1 %)"], [])),
        ({"a": 1000, "b": 1890}, ([], ["b: 2,000 -> 1,890 (-5.5 %)"])),
        ({"a": 1000, "c": 1}, ([], ["b: only stored", "c: only counted"])),
    ):
        assert count.compare(COUNTED | {"instructions": counts}, stored) == expected
    for key in ("build", "instruction set"):
        with pytest.raises(SystemExit, match=f"{key}: got other, counts are stored for "):
            count.compare(COUNTED | {key: "other"}, stored)


def test_counting_without_valgrind_or_program_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="valgrind was not found: install it"):
        count.count(tmp_path / "count_passes")
    (tmp_path / "valgrind").write_text("#!/bin/sh\n")
    (tmp_path / "valgrind").chmod(0o755)
    with pytest.raises(SystemExit, match="count_passes was not found: CMake builds it where"):
        count.count(tmp_path / "count_passes")
