# SPDX-License-Identifier: Apache-2.0
"""What training by shares refuses, and what its processes must have alike."""

import json
import platform
from concurrent.futures import Future
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..exchange import apart, callers, groups
from ..exchange.callers import Sharing
from ..nn import SyncBatchNorm
from ..step.options import check_integer, check_module
from .together import drawn_from

_MACHINE = platform.machine()
_DENORMAL = torch.tensor(1e-310, dtype=torch.float64)


def options_of(device: torch.device) -> dict[str, str]:
    """Gives what bits depend on besides the program, and what it may change in the middle."""
    rounded = 1.0 + 1e-30 > 1.0, -1.0 - 1e-30 < -1.0, 1.0 - 1e-30 < 1.0
    autocast = [
        str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else "off"
        for kind in {"cpu", device.type}
    ]
    return environment_of(device) | {
        "autocast": " ".join(autocast),
        "denormal numbers": "kept" if _DENORMAL.mul(1).item() else "flushed",
        "default dtype": str(torch.get_default_dtype()),
        "rounding": "to nearest" if not any(rounded) else "another than to nearest",
        "mkldnn": str(torch.backends.mkldnn.enabled),
    }


def environment_of(device: torch.device) -> dict[str, str]:
    """Gives what bits depend on besides the program, by name."""
    found = {
        "PyTorch": str(torch.__version__),
        "threads": str(torch.get_num_threads()),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "processor": f"{_MACHINE} {torch.backends.cpu.get_cpu_capability()}",
    }
    backend: Any = torch.backends.mkldnn
    matmul = backend.matmul
    if device.type == "cuda":
        found["processor"] = torch.cuda.get_device_name(device)
        backend, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    chosen = [each.fp32_precision for each in (matmul, backend.conv, backend.rnn)]
    found["float32 precision"] = " ".join(chosen).replace("none", "ieee")
    return found


#: Tensors that have no elements yet.
_LAZY = nn.UninitializedParameter, nn.UninitializedBuffer


def check(module: Any, options: dict[str, Any], sharing: Sharing, processes: int) -> None:
    """Refuses arguments of Shares, and models whose bits would depend on the processes. options: by
    name, with the least value of each."""
    check_module(module)
    for name, (value, least) in options.items():
        check_integer(name, value, least)
    shares = options["shares"][0]
    if shares < processes:
        raise ValueError(f"shares: got {shares} for {processes} processes, expected one for each")
    if not callers.initialized() and (why := callers.others_beside()):
        raise ValueError(
            f"Shares: got one process, though {why}; expected "
            "torch.distributed.init_process_group before"
        )
    for name, part in module.named_modules():
        _check_part(name, part, sharing)
    tensors = dict((*module.named_parameters(), *module.named_buffers()))
    for name, tensor in tensors.items():
        elsewhere = isinstance(tensor, _LAZY) or hasattr(tensor, "full_tensor")  # a DTensor
        if elsewhere or tensor.layout != torch.strided:
            raise ValueError(
                f"module: got {name!r} without elements, or with a layout of its own, expected a "
                "dense tensor; a lazy module gets its parameters by a first call"
            )
    devices = {t.device for t in tensors.values()}
    if len(devices) > 1:
        raise ValueError(f"module: got tensors on {sorted(map(str, devices))}, expected one device")
    cudnn = torch.backends.cudnn
    if any(d.type == "cuda" for d in devices) and (cudnn.benchmark or not cudnn.deterministic):
        raise ValueError(
            f"torch.backends.cudnn: got benchmark = {cudnn.benchmark} and deterministic = "
            f"{cudnn.deterministic}, expected False and True"
        )


def _check_part(name: str, part: nn.Module, sharing: Sharing) -> None:
    kind = type(part).__name__
    if isinstance(part, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise ValueError(f"module: got {kind} at {name!r}, expected the model itself")
    if isinstance(part, torch.jit.ScriptModule):
        raise ValueError(f"module: got TorchScript at {name!r}, expected a module in Python")
    if isinstance(part, _BatchNorm) and not isinstance(part, SyncBatchNorm):
        raise ValueError(
            f"module: got {kind} at {name!r}, whose statistics would be those of a share, "
            "expected syncbn.convert_sync_batchnorm(module)"
        )
    if getattr(part, "sparse", False) is True:
        raise ValueError(f"module: got sparse gradients of {name!r}, expected sparse=False")
    if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
        raise ValueError(
            f"module: got max_norm of {name!r}, by which each forward writes to the weight, "
            "expected None"
        )
    for attribute, value in vars(part).items():
        if drawn_from(value) is not None:
            raise ValueError(
                f"module: got a generator of random numbers, {attribute!r} of {name!r}, from which "
                "the shares of a process would draw in turns; expected the default ones of "
                "PyTorch, NumPy and Python"
            )
    if isinstance(part, SyncBatchNorm):
        if part.state.sharing.name is not None:
            raise ValueError(f"module: got a process group at {name!r}, expected the default one")
        if part.state.sharing != sharing:
            raise ValueError(
                f"module: got another timeout or engine at {name!r} than in other layers, expected "
                "one for all"
            )
        if part.statistics != "reproducible":
            raise ValueError(
                f"module: got statistics={part.statistics!r} at {name!r}, whose bits depend on how "
                "samples are split, expected 'reproducible'"
            )
        if not part.sync:
            raise ValueError(f"module: got sync=False at {name!r}, expected True")


_told: Future | None = None


def agree(refused: str, said: dict[str, Any], processes: int) -> None:
    """Has every process say why it refuses its arguments, if it does, and what must be alike. All
    raise a ValueError, which names ranks. One that refuses its own does not wait for the others,
    unless it was refused before, too."""
    global _told
    if processes == 1:
        return
    if _told is not None:
        apart.is_done(_told, None)
    text = json.dumps([refused, said])
    _told = apart.begin(lambda: groups.gather_text(text, "Shares"))
    if refused:
        apart.is_done(_told, 1.0)
        return
    apart.is_done(_told, None)
    all_said = [json.loads(each) for each in _told.result()]
    for rank, (error, _) in enumerate(all_said):
        if error:
            raise ValueError(f"Shares: rank {rank} was refused its arguments: {error}")
    for name in said:
        values = [each[name] for _, each in all_said]
        if len(set(values)) > 1:
            got = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
            raise ValueError(f"Shares: {name}: got {got}, expected the same on all")
