# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' harness: what a run writes, and what it refuses. No time's size is looked at.

torch.nn.SyncBatchNorm is nowhere beside these: it refuses tensors on the CPU.
"""

import itertools
import json
import os
import re
import subprocess
import sys

import pytest

from support import PROJECT

BENCHMARKS = PROJECT / "benchmarks"
sys.path.append(str(BENCHMARKS))
import count  # noqa: E402
import targets  # noqa: E402

import report  # noqa: E402

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


def check_quartiles(values: list[float]) -> None:
    low, median, high = values
    assert 0 < low <= median <= high


def names(rows: list[dict], *keys: str) -> set[tuple]:
    return {tuple(row[key] for key in keys) for row in rows}


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
        *("passes", "exchange", "threads", "layers", "ranks", "steps"),
    }
    assert results["format"] == 2 and results["form"] == "tiny"
    assert results["passes"] == results["threads"] == []
    assert set(results["machine"]) == {
        *("processor", "cores", "caches", "platform", "python", "torch", "syncbn", "commit"),
        *("build", "instruction_set", "date", "load", "load_after"),
    }

    engines = {("Gloo", 2, 64, 9792), ("Gloo", 2, 512, 77888), ("Gloo", 2, 2048, 311360)}
    assert names(results["exchange"], "engine", "ranks", "channels", "bytes") == engines
    for row in results["exchange"]:
        assert 0 < row["microseconds"][0] <= row["microseconds"][2] <= row["p99"]

    directions = ("forward", "backward", "both")
    for row in results["layers"]:
        assert row["rounds"] >= 2
        assert set(row["milliseconds"]) == {"syncbn", "PyTorch"}
        assert set(row["ratios"]) == {"PyTorch", "float32"} - {row["dtype"]}
        for values in (*row["milliseconds"].values(), *row["ratios"].values()):
            check_quartiles(values)
    expected = itertools.product(
        ("fresh", "reused"),
        [1],
        ["2x8x3x5", "8x16x8x8"],
        ("float32", "bfloat16", "float16"),
        ("contiguous", "channels-last"),
        directions,
    )
    places = ["memory", "threads", "shape", "dtype", "layout", "direction"]
    assert names(results["layers"], *places) == set(expected)

    for row in results["ranks"] + results["steps"]:
        assert row["rounds"] >= 2
        check_quartiles(row["milliseconds"])
        check_quartiles(row["ratio"])
    layers = ["BatchNorm, not synchronized", "recipe, Gloo"]
    layers += ["syncbn, Gloo", "syncbn, shared memory"]
    expected = itertools.product([2], ["2x8x3x5"], layers, directions[:2])
    assert names(results["ranks"], "ranks", "shape", "variant", "direction") == set(expected)
    variants = {"BatchNorm2d, not synchronized", "syncbn, not synchronized", *layers[1:]}
    expected = itertools.product([2], ["ResNet-20"], [1], variants)
    assert names(results["steps"], "ranks", "network", "batch", "variant") == set(expected)

    pytest.importorskip("matplotlib")
    python(BENCHMARKS / "report.py", file)
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def layer_row(**fields: object) -> dict:
    row = {"shape": "2x256x128x128", "layout": "contiguous", "dtype": "float32", "threads": 1}
    row |= {"memory": "reused", "direction": "forward", "ratios": {"PyTorch": [0.4, 0.5, 0.6]}}
    return row | fields


def results_of(**parts: list[dict]) -> dict:
    empty = {"passes": [], "layers": [], "steps": []}
    return {"machine": {"caches": {"L2": 2**20, "L3": 2**25}}} | empty | parts


def test_each_figure_is_in_its_target():
    def targets_of(ratios: tuple[str, ...] = ("PyTorch",), **fields: object) -> list[str]:
        row = layer_row(ratios=dict.fromkeys(ratios, [1, 1, 1]), **fields)
        found = list(targets.figures(results_of(layers=[row])))
        return [
            t.name for t in targets.TARGETS for f in found if t.over == f["over"] and t.includes(f)
        ]

    other = "every other shape of 256 KiB and more"
    assert targets_of() == [other]
    assert targets_of(memory="fresh", dtype="float16", threads=2, layout="channels-last") == [other]
    assert targets_of(shape="64x2048", memory="fresh", threads=2) == ["(64, 2048)"]
    assert targets_of(shape="4096x2048") == ["(4096, 2048), reused memory"]
    assert targets_of(shape="4096x2048", memory="fresh") == [other]
    assert set(targets_of(shape="8x16x8x8")) == {"(8, 16, 8, 8), eager, one rank"}
    assert targets_of(shape="8x16x8x8", memory="fresh") == []
    assert targets_of(shape="8x16x8x8", dtype="bfloat16") == []

    half = {"ratios": ("float32",), "dtype": "bfloat16"}
    assert targets_of(**half) == ["16-bit types beyond the last cache"]
    # x and y in float32 are just as large as the cache.
    assert targets_of(**half, shape="2x2048x32x32") == ["16-bit types inside it"]
    assert targets_of(**half, shape="8x16x8x8") == []
    assert targets_of(**half, memory="fresh") == targets_of(**half, threads=2) == []
    two = {"ratios": ("one thread",), "threads": 2}
    assert targets_of(**two) == ["two threads beyond the last cache"]
    assert targets_of(**two, shape="8x64x56x56") == targets_of(**two, dtype="float16") == []

    def passes_of(**fields: object) -> list[str]:
        row = layer_row(times_copy=[1, 1, 1], **{"pass": "forward"} | fields)
        found = list(targets.figures(results_of(passes=[row])))
        return [
            t.name for t in targets.TARGETS for f in found if t.over == f["over"] and t.includes(f)
        ]

    for layout in ("contiguous", "channels-last"):
        of = {"56x56": "784 and more", "28x28": "784 and more", "14x14": "196", "7x7": "49"}
        for plane, text in of.items():
            assert passes_of(shape=f"8x64x{plane}", layout=layout) == [
                f"{layout}, planes of {text}"
            ]
    assert passes_of(shape="64x2048") == passes_of(memory="fresh") == passes_of(threads=2) == []
    assert passes_of(dtype="bfloat16") == passes_of(**{"pass": "normalize"}) == []

    steps = [
        {"network": n, "batch": b, "variant": "syncbn, shared memory", "ratio": [1, 1, 1]}
        for n, b in (("ResNet-20", 8), ("demo", 8))
    ]
    steps.append(steps[0] | {"variant": "syncbn, Gloo"})
    [figure] = [f for f in targets.figures(results_of(steps=steps)) if f["network"] == "ResNet-20"]
    assert [t.name[-2:] for t in targets.TARGETS if t.over == "plain" and t.includes(figure)] == [
        " 8"
    ]


def test_targets_say_reached_or_the_distance():
    target = next(t for t in targets.TARGETS if t.limits.get("forward") == 0.8)
    speed_up = next(t for t in targets.TARGETS if t.over == "one thread")

    def row_of(target: targets.Target, *rows: dict) -> list[str]:
        found = list(targets.figures(results_of(layers=list(rows))))
        return report.target_row(target, "forward", found)

    def ratio(*quartiles: float) -> dict:
        return {"ratios": {"PyTorch": list(quartiles)}}

    begin = [target.name, "forward", "≤ 0.8 of PyTorch's time"]
    assert row_of(target) == [*begin, "not measured", "", ""]
    assert row_of(target, layer_row(direction="backward"))[3] == "not measured"
    at_limit = layer_row(**ratio(0.7, 0.8, 0.9))
    assert row_of(target, at_limit)[3:] == ["0.80 [0.70, 0.90]", "(2, 256, 128, 128)", "reached"]
    # Never "0 %" for what is missed, and the worst case is named, wherever it stands.
    near = layer_row(**ratio(0.7, 0.8001, 0.9), dtype="float16", memory="fresh", threads=2)
    where = "(2, 256, 128, 128), float16, fresh memory, 2 threads"
    assert row_of(target, near)[3:] == ["0.80 [0.70, 0.90]", where, "1 % to go"]
    far = layer_row(**ratio(0.9, 1.0, 1.1), layout="channels-last")
    expected = ["1.00 [0.90, 1.10]", "(2, 256, 128, 128), channels-last"]
    expected.append("25 % to go, 1 of 3 reached")
    assert row_of(target, at_limit, far, near)[3:] == expected

    begin = [speed_up.name, "forward", "≥ 1.7 of one thread's speed"]
    for median, state in ((1.7, "reached"), (2.0, "reached"), (1.6, "7 % to go")):
        row = layer_row(threads=2, ratios={"one thread": [1.5, median, 2.5]})
        found = row_of(speed_up, row)
        assert found[:3] == begin and found[3:] == [
            f"{median:.2f} [1.50, 2.50]",
            "(2, 256, 128, 128), 2 threads",
            state,
        ]


def test_pages_are_made_of_the_stored_results():
    texts = [path.read_text(encoding="utf-8") for path in report.PAGES]
    results = json.loads(report.STORED.read_text(encoding="utf-8"))
    for text in texts:
        assert text == report.page(text, results), "python benchmarks/report.py makes it anew"
        emptied = re.sub(r"(report\.py -->).*?(<!-- end)", r"\1\2", text, flags=re.DOTALL)
        assert len(emptied) < len(text) and report.page(emptied, results) == text
    for part in ("machine", "targets", "passes", "steps", "exchange"):
        assert f"<!-- {part}: made by benchmarks/report.py -->" in "".join(texts)
    assert report.PLOT.exists()


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
