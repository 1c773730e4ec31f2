# SPDX-License-Identifier: Apache-2.0
"""Whether ranks disagreed in a step on CUDA, where nobody looks at the time."""

import torch
from torch import nn

from ..errors import DivergenceError
from ..nn import SyncBatchNorm
from .classes import check_module


def check(module: nn.Module) -> None:
    """Raises an error if the ranks disagreed in the last training call of a layer of `module`.

    On CUDA over NCCL a step waits for nothing. If the ranks' calls differ, or a rank refuses its
    input, all ranks get NaN, and running statistics do not change. This function reads what the
    calls left on the device, and waits for each device once. It exchanges nothing, and gives the
    same result on all ranks of a group.

    Raises:
        DivergenceError: ranks disagreed. The text names the layers, in the order of
            module.named_modules().
        ValueError: `module` is not a module.
    """
    check_module(module)
    layers = [(n, m) for n, m in module.named_modules() if isinstance(m, SyncBatchNorm)]
    by_device: dict[torch.device, list[tuple[str, SyncBatchNorm]]] = {}
    for name, layer in layers:
        by_device.setdefault(layer.state.count.device, []).append((name, layer))
    found = {}
    for entries in by_device.values():
        states = torch.stack([torch.cat((m.state.count, m.state.call)) for _, m in entries])
        for (name, layer), (count, calls) in zip(entries, states.tolist(), strict=True):
            if count < 0:
                call = f"call {calls - 1}, {layer.num_features} channels"
                found[name] = f"{name or layer.state.name} ({call}, {layer.options()})"
    if found:
        texts = "; ".join(found[name] for name, _ in layers if name in found)
        raise DivergenceError(
            "the ranks did not make the same call, or one refused its input, so that outputs are "
            f"NaN. On this rank: {texts}"
        )
