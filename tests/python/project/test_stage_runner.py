# SPDX-License-Identifier: Apache-2.0
"""scripts/stage_runner.py: stages and their time, what tests say, the report on disk."""

import json
import sys
import time
from pathlib import Path

import pytest

from support import PROJECT

sys.path.insert(0, str(PROJECT / "scripts"))
import stage_runner
from stage_runner import Runner, Stage

PASSED = '<testcase name="{}"/>'
IMPOSSIBLE = '<testcase name="{}"><skipped message="not possible here: one GPU"/></testcase>'
SKIPPED = '<testcase name="{}"><skipped message="needs a GPU"/></testcase>'
NOT_FOUND = '<testcase name="{}" status="notrun"><skipped message="Unable to find it"/></testcase>'
FAILED = '<testcase name="{}"><failure message="m">text</failure></testcase>'
# As CTest 3.30 writes a test of GoogleTest that skipped itself.
CTEST = """<testcase name="{}" status="notrun"><skipped message="SKIP_REGULAR_EXPRESSION_MATCHED"/>
<system-out>nccl_test.cpp:152: Skipped
not possible here: needs a second GPU

[  SKIPPED ] Nccl.RanksAsThreadsExact (0 ms)</system-out></testcase>"""


def junit(*cases: str) -> str:
    named = "".join(case.format(f"t{i}") for i, case in enumerate(cases))
    return f"<testsuites><testsuite>{named}</testsuite></testsuites>"


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-c", code]


def runner(folder: Path, **more) -> Runner:
    return Runner({"device": "d"}, folder / "report.json", folder / "logs", folder, **more)


def run(folder: Path, *wanted: Stage, **more) -> list[dict]:
    """The results, which are also on disk."""
    it = runner(folder, **more)
    it.run_all(list(wanted), time.monotonic())
    assert json.loads(it.path.read_text())["stages"] == it.results
    return it.results


def words(results: list[dict]) -> list[tuple[str, str]]:
    return [(result["status"], result["summary"]) for result in results]


def test_failed_stage_is_recorded_and_the_rest_runs(tmp_path):
    def broken() -> str:
        raise RuntimeError("no report")

    right = python("import os; assert os.environ['A'] == 'b'")
    results = run(
        tmp_path,
        Stage("fails", 30, [python("print('why'); exit(3)"), python("never")]),
        Stage("absent", 30, [["/no/such/program"]]),
        Stage("no report", 30, [python("")], broken),
        Stage("lacks", 30, [python("never")], missing=lambda: "no such thing here"),
        Stage("works", 30, [right], environment={"A": "b"}),
    )
    assert [result["status"] for result in results] == ["failed"] * 4 + ["ok"]
    assert results[0]["summary"] == "exit code 3" and "why" in results[0]["log"]
    assert "never" not in results[0]["log"]
    assert "/no/such/program" in results[1]["log"]
    assert results[2]["summary"] == "RuntimeError: no report"
    assert results[3]["summary"] == "no such thing here" and results[3]["log"] == ""
    text = stage_runner.table(results)
    assert text.count("FAILED") == 4 and text.splitlines()[4].startswith("works      ok")


def test_time_limits_end_children_too(tmp_path):
    marker = tmp_path / "child"
    child = f"import time, pathlib; time.sleep(3); pathlib.Path({str(marker)!r}).touch()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-I', '-c', {child!r}])"
    start = time.monotonic()
    results = run(tmp_path, Stage("late", 1.5, [python(parent)]), Stage("too late", 0, [["/x"]]))
    assert results[0]["summary"].startswith("not done after")
    assert results[1]["summary"] == "no time left"
    time.sleep(max(0, start + 4 - time.monotonic()))
    assert not marker.exists()


def test_time_that_a_stage_leaves_is_the_next_ones(tmp_path):
    slow = python("import time; time.sleep(2)")
    quick, hangs = python(""), python("import time; time.sleep(60)")
    stages = [Stage("quick", 3, [quick]), Stage("slow", 1.2, [slow]), Stage("hangs", 1.5, [hangs])]
    results = run(tmp_path, *stages, Stage("last", 20, [quick]))
    assert [result["status"] for result in results] == ["ok", "ok", "failed", "ok"]


@pytest.mark.parametrize(
    "cases, status, summary",
    (
        ((PASSED, PASSED), "ok", "2 passed"),
        ((PASSED, IMPOSSIBLE), "ok", "1 passed, 1 not possible here"),
        ((PASSED, CTEST), "ok", "1 passed, 1 not possible here"),
        ((PASSED, SKIPPED), "failed", "tests that did not run: 1 passed, 1 failed"),
        ((PASSED, NOT_FOUND), "failed", "tests that did not run: 1 passed, 1 failed"),
        ((IMPOSSIBLE,), "failed", "no test passed: 0 passed, 1 not possible here"),
        ((), "failed", "no test passed: 0 passed"),
        ((PASSED, FAILED), "failed", "exit code 1: 1 passed, 1 failed"),
    ),
)
def test_what_tests_say(tmp_path, cases, status, summary):
    """A test that was skipped for any other reason than what the device cannot do has failed."""
    report = tmp_path / "tests.xml"
    write = f"open({str(report)!r}, 'w').write({junit(*cases)!r})"
    code = int(FAILED in cases)
    stage = Stage("tests", 30, [python(f"{write}; exit({code})")], tests=report)
    (result,) = run(tmp_path, stage)
    assert (result["status"], result["summary"]) == (status, summary)
    impossible = {IMPOSSIBLE: "one GPU", CTEST: "needs a second GPU"}
    told = {f"t{i}": impossible[c] for i, c in enumerate(cases) if c in impossible}
    assert result["not possible here"] == told
    wrong = {SKIPPED: "skipped: needs a GPU", FAILED: "m\ntext", NOT_FOUND: "skipped: Unable"}
    for i, case in enumerate(cases):
        if case in wrong:
            assert result["failures"][f"t{i}"].startswith(wrong[case])


def test_tests_that_wrote_nothing_have_failed(tmp_path):
    report = tmp_path / "tests.xml"
    (result,) = run(tmp_path, Stage("tests", 30, [python("")], tests=report))
    assert words([result]) == [("failed", "no result of the tests")]
    write = f"open({str(report)!r}, 'w').write('<testsuites>')"
    (result,) = run(tmp_path, Stage("tests", 30, [python(write)], tests=report))
    assert result["status"] == "failed" and result["summary"].startswith("ParseError")


def test_what_the_device_does_not_support_is_told_apart(tmp_path):
    unsupported = python("print('========= Error: Device not supported'); exit(1)")
    other = python("print('race reported'); exit(1)")
    text = "Device not supported"
    results = run(
        tmp_path,
        Stage("other device", 30, [unsupported], unsupported=text),
        Stage("finds a race", 30, [other], unsupported=text),
    )
    assert words(results) == [("not possible here", text), ("failed", "exit code 1")]


def test_gpu_that_is_gone_ends_the_rest_at_once(tmp_path):
    """Each of them would wait for its whole time."""
    state = ["", "the GPU is gone"]
    fails, hangs = python("exit(1)"), python("import time; time.sleep(60)")
    stages = [Stage("a", 9, [fails]), Stage("b", 9, [fails]), Stage("c", 99, [hangs])]
    results = run(tmp_path, *stages, lost=lambda: state.pop(0))
    assert [r["summary"] for r in results] == ["exit code 1", "exit code 1", "the GPU is gone"]
    assert {r["status"] for r in results} == {"failed"}


def test_report_is_on_disk_while_a_stage_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(stage_runner, "TICK", 0.2)
    seen = []

    def live() -> dict:
        path = tmp_path / "report.json"
        seen.append(json.loads(path.read_text()) if path.exists() else None)
        return {"benchmarks": len(seen)}

    talks = python("import time; print('so far', flush=True); time.sleep(1.5)")
    results = run(tmp_path, Stage("first", 9, [python("")]), Stage("talks", 9, [talks]), live=live)
    assert [r["status"] for r in results] == ["ok", "ok"]
    (during,) = {r["running"]["log"] for r in seen if r and "log" in r.get("running", {})} - {""}
    assert "so far" in during
    last = next(r for r in reversed(seen) if "log" in r.get("running", {}))
    assert [stage["name"] for stage in last["stages"]] == ["first"] and last["benchmarks"] > 2
    assert not list(tmp_path.glob("*.part"))
