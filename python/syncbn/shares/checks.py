# SPDX-License-Identifier: Apache-2.0
"""What training by shares refuses, and what its processes must have alike."""

import hashlib
import json
import platform
from concurrent.futures import Future
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..exchange import apart, groups
from ..nn import SyncBatchNorm
from ..step.options import check_module


def number_of(*parts: object) -> int:
    """A seed of 64 bits that stands for these parts."""
    text = " ".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")


def environment_of(device: torch.device) -> dict[str, str]:
    """What bits depend on besides the program, by name."""
    found = {
        "PyTorch": str(torch.__version__),
        "threads": str(torch.get_num_threads()),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
    }
    backend: Any = torch.backends.mkldnn
    matmul = backend.matmul
    if device.type == "cuda":
        found["processor"] = torch.cuda.get_device_name(device)
        backend, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    chosen = [each.fp32_precision for each in (matmul, backend.conv, backend.rnn)]
    found["float32 precision"] = " ".join(chosen).replace("none", "ieee")
    return found


def check(module: Any, shares: Any, seed: Any, processes: int) -> None:
    """Refuses arguments of Shares, and models whose bits would depend on the processes."""
    check_module(module)
    for name, value, least in (("shares", shares, 1), ("seed", seed, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name}: got {value!r}, expected an integer of at least {least}")
    if shares < processes:
        raise ValueError(f"shares: got {shares} for {processes} processes, expected one for each")
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    for name, part in module.named_modules():
        kind = type(part).__name__
        compiled = hasattr(part, "_orig_mod") or part._compiled_call_impl is not None
        if isinstance(part, wrappers) or compiled:
            kind = f"compiled {kind}" if compiled else kind
            raise ValueError(f"module: got {kind} at {name!r}, expected the model itself")
        if isinstance(part, _BatchNorm) and not isinstance(part, SyncBatchNorm):
            raise ValueError(
                f"module: got {kind} at {name!r}, whose statistics would be those of a share, "
                "expected syncbn.convert_sync_batchnorm(module)"
            )
        if getattr(part, "sparse", False) is True:
            raise ValueError(f"module: got sparse gradients of {name!r}, expected sparse=False")
        if isinstance(part, SyncBatchNorm):
            if part.state.sharing.name is not None:
                raise ValueError(
                    f"module: got a process group at {name!r}, expected the default one"
                )
            for option, needed in (("statistics", "reproducible"), ("inplace", False)):
                if (got := getattr(part, option)) != needed:
                    raise ValueError(
                        f"module: got {option}={got!r} at {name!r}, expected {needed!r}"
                    )
    devices = {t.device for t in (*module.parameters(), *module.buffers())}
    if len(devices) > 1:
        raise ValueError(f"module: got tensors on {sorted(map(str, devices))}, expected one device")
    cudnn = torch.backends.cudnn
    if any(d.type == "cuda" for d in devices) and (cudnn.benchmark or not cudnn.deterministic):
        raise ValueError(
            f"torch.backends.cudnn: got benchmark = {cudnn.benchmark} and deterministic = "
            f"{cudnn.deterministic}, expected False and True"
        )


_told: Future | None = None


def agree(refused: str, said: dict[str, Any], processes: int) -> None:
    """Every process says why it refuses its arguments, if it does, and what must be alike. All
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
