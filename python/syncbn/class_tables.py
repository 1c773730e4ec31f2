# SPDX-License-Identifier: Apache-2.0
"""Tables of other libraries that say by exact class what to do with a layer. Layers of this package
get the entry of PyTorch's when they are made. Nothing is imported here."""

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

#: What is counted for a layer; which layers are refused.
_TABLES = (
    ("thop.profile", "register_hooks"),
    ("ptflops.pytorch_ops", "MODULES_MAPPING"),
    ("opacus.validators.module_validator", "ModuleValidator.VALIDATORS"),
)
#: What replaces a layer.
_REPLACING = ("opacus.validators.module_validator", "ModuleValidator.FIXERS")


def _of(module: str, path: str) -> dict[type, Any]:
    found: Any = sys.modules.get(module)
    for name in path.split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, dict) else {}


def _replacing(replace: Callable) -> Callable:
    @functools.wraps(replace)
    def replacing(layer: Any, **options: Any) -> nn.Module:
        if layer.activation != "none":
            raise ValueError(
                f"{layer.state.name}: got activation {layer.activation!r}, which what replaces the "
                "layer would not have; expected 'none'"
            )
        return replace(layer, **options)

    return replacing


def register(cls: type[nn.Module], whole: bool) -> None:
    """Enters the class. whole: its forward is that of a batch norm and nothing more."""
    for module, path in (*_TABLES, _REPLACING):
        table = _of(module, path)
        entry = table.get(nn.SyncBatchNorm, table.get(nn.BatchNorm2d))
        if entry is None or (module, path) == _REPLACING and not whole:
            continue
        table.setdefault(cls, _replacing(entry) if (module, path) == _REPLACING else entry)
