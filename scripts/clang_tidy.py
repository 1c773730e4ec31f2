# SPDX-License-Identifier: Apache-2.0
"""Run clang-tidy over every file of the project that some build compiles: those of tests/ or the
others.

python scripts/clang_tidy.py {tests|others} JOBS CLANG_TIDY BUILD_FOLDER...
"""

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def main() -> int:
    which, jobs, program, *builds = sys.argv[1:]
    project = Path.cwd()
    commands: dict[Path, dict] = {}
    for build in builds:
        for entry in json.loads(Path(build, "compile_commands.json").read_text(encoding="utf-8")):
            file = Path(entry["directory"], entry["file"])
            # Neither generated nor fetched files, nor nvcc's, nor C, whose names are others; in two
            # builds the first counts.
            if file.suffix in (".cu", ".c"):
                continue
            if file.is_relative_to(project / "tests") != (which == "tests"):
                continue
            if file.is_relative_to(project) and not file.is_relative_to(project / "build"):
                commands.setdefault(file.relative_to(project), entry)
    for entry in commands.values():  # clang cannot read GCC's precompiled headers
        entry["command"] = re.sub(r" -include \S*/cmake_pch\.hxx", "", entry["command"])
    database = project / "build" / "clang-tidy"
    database.mkdir(parents=True, exist_ok=True)
    (database / "compile_commands.json").write_text(json.dumps([*commands.values()]), "utf-8")

    def check(file: Path) -> bool:
        # The flags are the compiler's, which may know warnings that clang does not.
        extra = "--extra-arg=-Wno-unknown-warning-option"
        command = [program, "--quiet", extra, "-p", str(database), str(file)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            print(f"{result.stdout}{result.stderr}", end="", flush=True)
        return result.returncode == 0

    with ThreadPoolExecutor(int(jobs)) as pool:
        return 0 if all(list(pool.map(check, sorted(commands)))) else 1


if __name__ == "__main__":
    sys.exit(main())
