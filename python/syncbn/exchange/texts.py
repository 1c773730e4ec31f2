# SPDX-License-Identifier: Apache-2.0
"""What ranks that meet write into the store, and how they read it: another program, or another
version of this package, may have written there."""

import json
from typing import Any, NamedTuple


class Offer(NamedTuple):
    """Holds what a rank announces. who: the layer or function that needs the group. asks: what all
    ranks must ask for alike, as a text. value: what the others need of this rank."""

    who: str
    asks: str = ""
    value: Any = None
    process: tuple = ()
    round: str = ""
    at: float = 0.0
    beginning: int = 0


class Malformed(Exception):
    """Says what the store holds that no rank of this version writes."""


#: Texts have the form of these, in JSON: as many elements of the same types in lists, and any
#: number of such values in dictionaries.
_VERDICT_FORM = ("", "", 0.0, 0)


def _fits(value: Any, form: Any) -> bool:
    if isinstance(form, tuple):
        return isinstance(value, list) and len(value) == len(form) and all(map(_fits, value, form))
    if isinstance(form, dict):
        (item,) = form.values()
        return isinstance(value, dict) and all(_fits(each, item) for each in value.values())
    return type(value) is type(form) or (type(form) is float and type(value) is int)


def malformed(key: str, text: str | bytes) -> Malformed:
    return Malformed(
        f"{key}: got {text[:80]!r} in the store of torch.distributed, expected what ranks with "
        "this version of syncbn write there"
    )


def load(key: str, text: str | bytes, form: Any) -> Any:
    """Reads a text of the store, at that key. It has the form of the given value."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not _fits(value, form):
        raise malformed(key, text)
    return value


def decoded(key: str, text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError:
        raise malformed(key, text) from None


def parts(now: str) -> tuple[str, str, str]:
    token, whole, *verdict = now.split(" ", 2) if " " in now else ("", "")
    if not token or not whole:
        raise malformed("now", now)
    return token, whole, "".join(verdict)


def verdict_of(text: str, *kinds: type[Exception]) -> tuple[type[Exception], str, float, int]:
    """Reads an error of one of the kinds, why, when, and at which beginning of a round."""
    name, why, at, beginning = load("verdict", text, _VERDICT_FORM)
    for kind in kinds:
        if kind.__name__ == name:
            return kind, why, at, beginning
    raise malformed("verdict", text)
