# SPDX-License-Identifier: Apache-2.0
"""scripts/index_page.py: links of the package index's page lead into the repository. Where that is
unknown there are none."""

import re
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT / "scripts"))
import index_page  # noqa: E402

README = (PROJECT / "README.md").read_text(encoding="utf-8")
LINKS = {link[2] + link[3] for link in index_page.LINK.findall(index_page.CODE.sub("", README))}
REPOSITORY = "https://example.org/owner/syncbn"


def addresses(text: str) -> list[str]:
    return re.findall(r"\]\((.*?)\)", index_page.CODE.sub("", text))


def test_links_lead_to_the_tag_in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCBN_REPOSITORY", f"{REPOSITORY}@v0.1.0")
    page = index_page.dynamic_metadata("readme", {})["text"]
    files = {re.sub(rf"{REPOSITORY}/(?:blob|raw)/v0\.1\.0/", "", link) for link in addresses(page)}
    assert files == LINKS and len(LINKS) > 10
    assert f"]({REPOSITORY}/raw/v0.1.0/docs/images/performance.png)" in page
    urls = index_page.dynamic_metadata("urls", {})
    assert urls["Source"] == REPOSITORY
    for address in urls.values():
        path = re.sub(rf"{REPOSITORY}(?:/blob/v0\.1\.0/)?", "", address)
        assert (PROJECT / path).exists()


def test_without_a_repository_there_are_no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SYNCBN_REPOSITORY", raising=False)
    page = index_page.dynamic_metadata("readme", {})["text"]
    assert addresses(page) == [] and "(Platforms)" not in page and "Platforms says" in page
    assert index_page.CODE.findall(page) == index_page.CODE.findall(README)
    assert index_page.dynamic_metadata("urls", {}) == {}


@pytest.mark.parametrize("given", (REPOSITORY, "owner/syncbn@v1", "https://example.org/a/b/c@v1"))
def test_another_form_of_address_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("SYNCBN_REPOSITORY", given)
    with pytest.raises(ValueError, match="expected https://HOST/OWNER/NAME@TAG"):
        index_page.dynamic_metadata("readme", {})
