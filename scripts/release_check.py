# SPDX-License-Identifier: Apache-2.0
"""Tries what a release publishes: python scripts/release_check.py [--linked] SDIST WHEEL...

Compared: the versions and addresses in the metadata of each file, the tag that SYNCBN_REPOSITORY
names, and the source distribution's files with those that git tracks. Then each wheel is installed
into an empty environment, with the PyTorch that pip downloads. There smoke_wheel.py trains, and the
programs of README.md run on two ranks. --linked takes the PyTorch of this interpreter instead.
"""

import argparse
import email.parser
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import index_page
import smoke_wheel

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "python" / "support"))
from snippets import blocks  # noqa: E402

RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def metadata_of(file: Path) -> bytes:
    """PKG-INFO of a source distribution, METADATA of a wheel."""
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as archive:
            (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
            return archive.read(name)
    with tarfile.open(file) as archive:
        stored = archive.extractfile(f"{file.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert stored is not None
        return stored.read()


def check_metadata(file: Path, version: str) -> Iterator[str]:
    metadata = email.parser.BytesParser().parsebytes(metadata_of(file))
    if metadata["Version"] != version:
        yield f"{file.name}: Version: got {metadata['Version']}, expected {version}"
    urls = [f"{key}, {url}" for key, url in index_page.dynamic_metadata("urls", {}).items()]
    if metadata.get_all("Project-URL", []) != urls:
        got = metadata.get_all("Project-URL", [])
        yield f"{file.name}: Project-URL: got {got}, expected {urls}"


def check_tag(version: str) -> Iterator[str]:
    """The addresses of a release are those of its tag."""
    place = index_page.place()
    if "dev" not in version and (place is None or place[1] != f"v{version}"):
        got = "none" if place is None else "@".join(place)
        yield f"SYNCBN_REPOSITORY: got {got}, expected https://HOST/OWNER/NAME@v{version}"


def check_files(sdist: Path) -> Iterator[str]:
    """Nothing lies in it that is not part of the project."""
    with tarfile.open(sdist) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True)
    for name in sorted(files - {"PKG-INFO", *listed.stdout.decode().splitlines()}):
        yield f"{sdist.name}: {name}: git does not track it"


def try_wheel(wheel: Path, linked: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        smoke_wheel.smoke(wheel, None if linked else "", folder)
        own = [b.text for b in blocks(ROOT / "README.md") if b.kind == "python" and not b.source]
        (folder / "readme.py").write_text("\n".join(own), encoding="utf-8")
        python = str(folder / "venv" / "bin" / "python")
        print(smoke_wheel.run([python, *RANKS, "readme.py"], folder), end="")
    print(f"{wheel}: installed alone, trains, and runs the programs of README.md")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sdist", type=Path)
    parser.add_argument("wheels", type=Path, nargs="+")
    parser.add_argument("--linked", action="store_true", help="with this interpreter's PyTorch")
    given = parser.parse_args()
    version = given.sdist.name.removeprefix("syncbn-").removesuffix(".tar.gz")
    problems = [*check_tag(version), *check_files(given.sdist)]
    for file in (given.sdist, *given.wheels):
        problems += check_metadata(file, version)
    try:
        for wheel in given.wheels if not problems else ():
            try_wheel(wheel, given.linked)
    except smoke_wheel.Failed as error:
        problems.append(str(error))
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        print(f"{version}: ready to publish")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
