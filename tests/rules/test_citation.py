# SPDX-License-Identifier: Apache-2.0
"""CITATION.cff and the changelog say what version.h and pyproject.toml say."""

import re
from pathlib import Path

import yaml

PROJECT = Path(__file__).resolve().parents[2]


def test_citation_agrees_with_the_package() -> None:
    citation = yaml.safe_load((PROJECT / "CITATION.cff").read_text(encoding="utf-8"))
    package = (PROJECT / "pyproject.toml").read_text(encoding="utf-8")
    header = (PROJECT / "include" / "syncbn" / "version.h").read_text(encoding="utf-8")
    release = ".".join(re.findall(r"VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header))
    assert str(citation["version"]) == release
    changelog = (PROJECT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## \[(\d\S*)\] - (\S+)$", changelog, re.M)
    assert re.findall(r"^## .*", changelog, re.M)[0] == "## [Unreleased]"
    (suffix,) = re.findall(r'^result = "{major}\.{minor}\.{patch}(|\.dev0)"', package, re.M)
    if suffix:
        assert release not in dict(released)
    else:
        assert released[0] == (release, str(citation["date-released"]))
    assert f'license = "{citation["license"]}"' in package
    keywords = ", ".join(f'"{word}"' for word in citation["keywords"])
    assert f"keywords = [{keywords}]" in package
    (author,) = citation["authors"]
    assert f'authors = [{{ name = "{author["name"]}" }}]' in package
    required = {"cff-version", "message", "title", "type", "abstract"}  # of the format 1.2.0
    assert required <= citation.keys() and citation["cff-version"] == "1.2.0"
