# SPDX-License-Identifier: Apache-2.0
"""Hooks of mkdocs.yml: the site's pages that are files outside of docs/, which are written once,
for readers of the repository, links to files that the site does not have, the docstrings of the
names in docs/api.md, and the C++ headers."""

import re
from pathlib import Path

from index_page import replace_links
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "src/README.md": "design.md",
}
# The page that the site makes of the C++ and C headers.
CPP_REFERENCE = "cpp_reference.md"
HEADERS = ("include/syncbn/*.hpp", "bindings/libtorch/syncbn/*.hpp", "include/syncbn/*.h")
# Whose members the site shows, besides what they are called with.
MEMBERS = {
    "syncbn.SyncBatchNorm": "forward convert_sync_batchnorm process_group reset_running_stats",
    "syncbn.parallel.SelfDataParallel": "forward",
    "syncbn.Shares": "step loader no_sync mine",
    "syncbn.graph.Network": "input append output train infer run module parameters graph",
    "syncbn.graph.BatchNorm": "forward",
}


def docstrings(names: list[str]) -> str:
    """What mkdocstrings makes the reference of."""
    return "".join(
        f"\n::: {name}\n    options:\n      members: [{', '.join(MEMBERS.get(name, '').split())}]\n"
        for name in names
    )


def relink(text: str, page: Path) -> str:
    """The page's links as the site needs them; of a link to a file outside of it the text. `page`
    is its place in the repository."""

    def replace(match: re.Match[str]) -> str:
        mark, label, target, anchor = match.groups()
        path = (page.parent / target).resolve().relative_to(ROOT)
        if str(path) in PAGES:
            return f"[{label}]({PAGES[str(path)]}{anchor or ''})"
        if path.parts[0] == "docs":
            return f"{mark}[{label}]({path.relative_to('docs')}{anchor or ''})"
        if not (ROOT / path).exists():
            raise ValueError(f"{page.relative_to(ROOT)}: there is no {target}")
        return f"{label} (`{path}`)"

    return replace_links(text, replace)


def on_config(config):
    text = (ROOT / "include" / "syncbn" / "version.h").read_text(encoding="utf-8")
    numbers = [re.search(rf"VERSION_{part} (\d+)", text)[1] for part in ("MAJOR", "MINOR", "PATCH")]
    config.copyright = f"syncbn {'.'.join(numbers)}"  # in the footer of every page
    return config


def on_files(files, config):
    for source, page in PAGES.items():
        content = relink((ROOT / source).read_text(encoding="utf-8"), ROOT / source)
        files.append(File.generated(config, page, content=content))
    headers = [path for pattern in HEADERS for path in sorted(ROOT.glob(pattern))]
    content = "# C++ reference\n" + "".join(
        f"\n## syncbn/{path.name}\n\n```cpp\n{path.read_text(encoding='utf-8')}```\n"
        for path in headers
    )
    files.append(File.generated(config, CPP_REFERENCE, content=content))
    return files


def on_page_markdown(markdown, page, config, files):
    if page.file.generated_by is not None:
        return markdown
    if page.file.src_uri == "api.md":
        cells = re.findall(r"^\| (`syncbn\..*?`) \|", markdown, re.M)
        markdown += docstrings(re.findall(r"`(.*?)`", "".join(cells)))
    return relink(markdown, ROOT / "docs" / page.file.src_uri)
