# SPDX-License-Identifier: Apache-2.0
"""What `make release-check` refuses: scripts/release_check.py tells each defect of the files."""

import io
import sys
import tarfile
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
import release_check  # noqa: E402

REPOSITORY = "https://example.org/owner/syncbn"
URLS = (
    f"Project-URL: Source, {REPOSITORY}\n"
    f"Project-URL: Documentation, {REPOSITORY}/blob/v1.2.3/docs/start.md\n"
    f"Project-URL: Changelog, {REPOSITORY}/blob/v1.2.3/CHANGELOG.md\n"
)


def sdist(folder: Path, metadata: str, *files: str) -> Path:
    made = folder / "syncbn-1.2.3.tar.gz"
    with tarfile.open(made, "w:gz") as archive:
        for name in ("PKG-INFO", *files):
            content = metadata.encode() if name == "PKG-INFO" else b""
            entry = tarfile.TarInfo(f"syncbn-1.2.3/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return made


@pytest.mark.parametrize(
    ("version", "urls", "told"),
    (
        ("1.2.3", URLS, []),
        ("1.2.4", URLS, ["syncbn-1.2.3.tar.gz: Version: got 1.2.4, expected 1.2.3"]),
        ("1.2.3", "", ["syncbn-1.2.3.tar.gz: Project-URL: got [], expected ['Source, "]),
    ),
)
def test_metadata_is_that_of_the_release(tmp_path, monkeypatch, version, urls, told):
    monkeypatch.setenv("SYNCBN_REPOSITORY", f"{REPOSITORY}@v1.2.3")
    made = sdist(tmp_path, f"Metadata-Version: 2.4\nName: syncbn\nVersion: {version}\n{urls}\n")
    problems = list(release_check.check_metadata(made, "1.2.3"))
    assert len(problems) == len(told)
    assert all(problem.startswith(start) for problem, start in zip(problems, told))


@pytest.mark.parametrize(
    ("version", "tag", "refused"),
    (("1.2.3", "v1.2.3", 0), ("1.2.3", "v1.2.2", 1), ("1.2.3", "", 1), ("1.2.3.dev0", "", 0)),
)
def test_a_release_has_the_addresses_of_its_tag(monkeypatch, version, tag, refused):
    monkeypatch.setenv("SYNCBN_REPOSITORY", tag and f"{REPOSITORY}@{tag}")
    problems = list(release_check.check_tag(version))
    assert len(problems) == refused
    assert all(text.endswith("expected https://HOST/OWNER/NAME@v1.2.3") for text in problems)


def test_a_file_that_is_not_of_the_project_is_told(tmp_path):
    made = sdist(tmp_path, "", "LICENSE", "scripts/release_check.py", "notes.txt")
    told = ["syncbn-1.2.3.tar.gz: notes.txt: git does not track it"]
    assert list(release_check.check_files(made)) == told
