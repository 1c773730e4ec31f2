# SPDX-License-Identifier: Apache-2.0
"""What the package index shows: the README, beside which it has no files, and the addresses of the
project. pyproject.toml names this module; scikit-build-core calls `dynamic_metadata`.

SYNCBN_REPOSITORY=https://HOST/OWNER/NAME@TAG says where the files lie, in the form of GitHub's
addresses. Without it links become their text, and the page has no pictures.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")
CODE = re.compile(r"```.*?```", re.S)


def replace_links(text: str, replace: Callable[[re.Match[str]], str]) -> str:
    """The text with its links to files replaced; groups of a match: `!` of a picture, label, path,
    anchor."""
    pieces, end = [], 0
    for code in CODE.finditer(text):
        pieces += [LINK.sub(replace, text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*pieces, LINK.sub(replace, text[end:])])


def place() -> tuple[str, str] | None:
    """Address and tag of the repository, where they are known."""
    given = os.environ.get("SYNCBN_REPOSITORY", "")
    match = re.fullmatch(r"(https://[\w.-]+/[\w.-]+/[\w.-]+)@([\w.-]+)", given)
    if given and not match:
        raise ValueError(f"SYNCBN_REPOSITORY: got {given!r}, expected https://HOST/OWNER/NAME@TAG")
    return (match[1], match[2]) if match else None


def page(readme: str) -> str:
    known = place()

    def replace(match: re.Match[str]) -> str:
        mark, label, target, anchor = match.groups()
        if known is None:
            return "" if mark else label
        repository, tag = known
        address = f"{repository}/{'raw' if mark else 'blob'}/{tag}/{target}{anchor or ''}"
        return f"{mark}[{label}]({address})"

    return replace_links(readme, replace)


def dynamic_metadata(field: str, settings: dict[str, Any]) -> dict[str, str]:
    if field == "readme":
        text = (ROOT / "README.md").read_text(encoding="utf-8")
        return {"content-type": "text/markdown", "text": page(text)}
    known = place()
    if known is None:
        return {}
    repository, tag = known
    return {
        "Source": repository,
        "Documentation": f"{repository}/blob/{tag}/docs/start.md",
        "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
    }
