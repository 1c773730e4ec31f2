# SPDX-License-Identifier: Apache-2.0
"""Runs commands stage by stage, each within its time, and keeps a report on disk as it goes: for
gpu_check.py, which may be ended, or lose its GPU, at any moment."""

import json
import os
import re
import shlex
import signal
import subprocess
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

#: What a test says, behind "skipped", of what this device cannot do. Any other skip is a failure:
#: all that is run here was asked for.
IMPOSSIBLE = re.compile(r"not possible here:? *(.*)")
TICK = 5  # seconds between two writings of the report
TEXT, LOG = 2_000, 60_000  # characters of one failure, of a log, that a report has at most


class Ended(BaseException):
    """Raised by the handler of a signal."""


@dataclass
class Stage:
    """Commands that run in turn. `missing` is asked first: what the stage lacks here, or nothing.
    `tests` is the JUnit file that they write. `after` runs when all succeeded: its text is the
    summary, and what it raises a failure. A failure with the text `unsupported` in its output is
    the device's, and no failure."""

    name: str
    seconds: float
    commands: list[list[str]]
    after: Callable[[], str] = lambda: ""
    environment: dict[str, str] = field(default_factory=dict)
    missing: Callable[[], str] = lambda: ""
    unsupported: str = ""
    tests: Path | None = None


@dataclass
class Tests:
    """What a JUnit file of pytest, ctest or GoogleTest says."""

    passed: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    impossible: dict[str, str] = field(default_factory=dict)

    def summary(self) -> str:
        parts = [f"{self.passed} passed"]
        parts += [f"{len(self.failed)} failed"] if self.failed else []
        parts += [f"{len(self.impossible)} not possible here"] if self.impossible else []
        return ", ".join(parts)


def read_tests(path: Path) -> Tests:
    tests = Tests()
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        # CTest says the name twice.
        name = ".".join(dict.fromkeys(filter(None, (case.get("classname"), case.get("name")))))
        bad = [e for e in case if e.tag in ("failure", "error")]
        skips = [e for e in case if e.tag == "skipped"]
        output = case.find("system-out")
        said = [e.get("message", "") + "\n" + (e.text or "") for e in bad + skips]
        text = "\n".join(said + ["" if output is None else output.text or ""])
        possible = IMPOSSIBLE.search(text)
        if skips and not bad and possible:
            tests.impossible[name] = possible[1]
        elif skips or bad or case.get("status") in ("disabled", "notrun"):
            tests.failed[name] = ("" if bad else "skipped: ") + text.strip()[-TEXT:]
        else:
            tests.passed += 1
    return tests


def run(
    command: list[str],
    log,
    seconds: float,
    environment: dict[str, str],
    folder: Path,
    tick: Callable[[], None],
) -> str:
    """Empty, or why it failed. Ends the command with all its children at its time limit."""
    log.write(f"$ {shlex.join(command)}\n".encode())
    log.flush()
    try:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # A group of its own, but not a session: who ends ours ends what it has left.
            preexec_fn=os.setpgrp,
        )
    except OSError as error:
        log.write(f"{error}\n".encode())
        return str(error)
    end = time.monotonic() + seconds
    try:
        while (left := end - time.monotonic()) > 0:
            try:
                code = process.wait(min(left, TICK))
                return "" if code == 0 else f"exit code {code}"
            except subprocess.TimeoutExpired:
                tick()
        return f"not done after {seconds:.0f} s" + end_group(process)
    except BaseException:
        end_group(process)
        raise


def end_group(process: subprocess.Popen) -> str:
    os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:  # stuck in the driver: no signal ends it
        return ", and cannot be ended"
    return ""


@dataclass
class Runner:
    """Runs stages in `folder` and rewrites the report at `path` with each result. Every stage has
    its seconds, and what those before it left over. `lost` is asked after a failure: why the rest
    need not be tried, or nothing. `live` gives entries of the report that change meanwhile."""

    report: dict
    path: Path
    logs: Path
    folder: Path
    lost: Callable[[], str] = lambda: ""
    live: Callable[[], dict] = dict
    results: list[dict] = field(default_factory=list)
    gone: str = ""  # why nothing else is started

    def write(self, **more: object) -> None:
        """At once as a whole: whoever ends this process finds an old or a new report."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(self.path.name + ".part")
        report = {**self.report, **self.live(), **more, "stages": self.results}
        part.write_text(json.dumps(report, indent=1) + "\n")
        os.replace(part, self.path)

    def run_all(self, wanted: list[Stage], start: float) -> None:
        """start: of the first stage, by time.monotonic()."""
        end = start
        for stage in wanted:
            end += stage.seconds
            self.write(running={"name": stage.name})
            self.results.append(self.run_stage(stage, end))
            if self.results[-1]["status"] == "failed" and not self.gone:
                self.gone = self.lost()
            self.write()
            print(table(self.results[-1:]), flush=True)
            if log := self.results[-1]["log"]:
                print(log[-2000:], flush=True)

    def run_stage(self, stage: Stage, end: float) -> dict:
        """Runs the stage until `end` and tells how it went; never raises."""
        self.logs.mkdir(parents=True, exist_ok=True)
        path = self.logs / f"{re.sub('[^A-Za-z0-9]+', '-', stage.name)}.log"
        begin = time.monotonic()

        def shortened() -> str:
            text = path.read_text(errors="replace") if path.exists() else ""
            return text if len(text) <= LOG else f"{text[: LOG // 4]}\n...\n{text[-3 * LOG // 4 :]}"

        def tick() -> None:
            seconds = round(time.monotonic() - begin, 1)
            running = {"name": stage.name, "seconds": seconds, "log": shortened()}
            self.write(running=running)

        problem, summary, tests = self.gone, "", Tests()
        try:
            if problem := problem or stage.missing():
                path.unlink(missing_ok=True)
            else:
                problem = self.run_commands(stage, path, end, tick)
            if not problem:
                summary = stage.after()
        except Ended as error:
            problem = self.gone = str(error)
        except Exception as error:  # a missing or broken result is this stage's failure
            problem = f"{type(error).__name__}: {error}"
        if stage.tests is not None and not self.gone:
            problem, summary, tests = judged(stage.tests, problem)
        status = "failed" if problem else "ok"
        output = shortened()
        if problem and stage.unsupported and stage.unsupported in output:
            status, problem = "not possible here", stage.unsupported
        return {
            "name": stage.name,
            "status": status,
            "seconds": round(time.monotonic() - begin, 1),
            "summary": problem or summary,
            "failures": tests.failed,
            "not possible here": tests.impossible,
            "log": output if problem else "",
        }

    def run_commands(self, stage: Stage, path: Path, end: float, tick: Callable) -> str:
        with path.open("wb") as log:
            for command in stage.commands:
                left = end - time.monotonic()
                if left <= 0:
                    return "no time left"
                if problem := run(command, log, left, stage.environment, self.folder, tick):
                    return problem
        return ""


def judged(path: Path, problem: str) -> tuple[str, str, Tests]:
    """Problem and summary by the tests' own words."""
    if not path.exists():
        return problem or "no result of the tests", "", Tests()
    try:
        tests = read_tests(path)
    except Exception as error:
        return problem or f"{type(error).__name__}: {error}", "", Tests()
    summary = tests.summary()
    if not problem and tests.failed:
        problem = "tests that did not run"
    if not problem and not tests.passed:
        problem = "no test passed"
    return f"{problem}: {summary}" if problem else "", summary, tests


WORDS = {"ok": "ok", "failed": "FAILED", "not possible here": "not possible here"}


def table(results: list[dict]) -> str:
    names, words = (max(len(r["name"]) for r in results), max(map(len, WORDS.values())))
    lines = []
    for result in results:
        status = WORDS[result["status"]]
        lines.append(
            f"{result['name']:{names}}  {status:{words}}  {result['seconds']:6.1f} s  "
            f"{result['summary']}"
        )
        # Apart from what passed, each with its reason.
        reasons = result["not possible here"].items()
        lines += [f"{'':{names}}  not possible here: {name}: {why}" for name, why in reasons]
    return "\n".join(lines)
