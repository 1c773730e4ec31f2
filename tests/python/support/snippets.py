# SPDX-License-Identifier: Apache-2.0
"""The fenced blocks of a page."""

import re
from pathlib import Path
from typing import NamedTuple

_BLOCK = re.compile(r"^(?:<!-- from (\S+) -->\n)?```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """source: the file that the block says it quotes; kind: what stands after the fence."""

    source: str | None
    kind: str
    text: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = [Block(source or None, kind, body) for source, kind, body in _BLOCK.findall(text)]
    assert len(found) * 2 == len(re.findall(r"^ *```", text, re.MULTILINE)), page
    return found
