# SPDX-License-Identifier: Apache-2.0
"""A CPU that says it is a GPU, for programs and tests that want one: "cuda" as a device is the CPU,
streams and events are in order anyway, and a CUDA graph is a list of operators, which run again
when it is replayed. What the hardware alone can do (its kernels, NCCL, the profiler) is not there.

Installed by being imported, behind PyTorch: sitecustomize.py.
"""

import contextlib
import math
import os
import sys
import time
import types

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Of the environment: "off" where the device is not there for now.
VARIABLE = "SYNCBN_FAKE_DEVICE"
#: Elements of a tensor; of the benchmarks the smallest alone, because a CPU is no GPU.
LARGEST = 1 << 18 if sys.orig_argv[1:2] and "bench_gpu" in sys.orig_argv[1] else 1 << 40
PROPERTIES = types.SimpleNamespace(
    name="Fake GPU",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=1 << 30,
    L2_cache_size=1 << 10,
)


def on_cpu(value: object) -> object:
    """The CPU for a device of CUDA, and anything else as it is."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and value.split(":")[0] == "cuda" else value


class OnCpu(TorchFunctionMode):
    """What is made on CUDA, or moved there, is on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        sizes = args[0] if args and isinstance(args[0], (tuple, list)) else args
        if function is torch.randn and math.prod(sizes) > LARGEST:
            raise torch.OutOfMemoryError("CUDA out of memory: the fake device is small")
        kwargs = {name: on_cpu(value) for name, value in (kwargs or {}).items()}
        return function(*map(on_cpu, args), **kwargs)


class Recorded(TorchDispatchMode):
    """Runs operators, notes them, and takes back what they wrote: a capture runs nothing."""

    def __init__(self, graph: "Graph"):
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        arguments = function._schema.arguments
        given = [*args, *(kwargs.get(a.name) for a in arguments[len(args) :])]
        written = [v for a, v in zip(arguments, given) if a.alias_info and a.alias_info.is_write]
        tensors = [t for t in tree_leaves(written) if isinstance(t, torch.Tensor)]
        self.graph.before += [(t, t.detach().clone()) for t in tensors]
        result = function(*args, **kwargs)
        self.graph.calls.append((function, args, kwargs, result))
        return result


class Graph:
    """In the place of torch.cuda.CUDAGraph."""

    def __init__(self):
        self.calls, self.before = [], []

    @torch.no_grad()
    def replay(self) -> None:
        for function, args, kwargs, result in self.calls:
            again = function(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old is not new:
                    old.detach().copy_(new)


@contextlib.contextmanager
def capture(graph: Graph, **_):
    graph.calls, graph.before = [], []
    capturing.append(graph)
    try:
        with Recorded(graph):
            yield
    finally:
        capturing.pop()
        with torch.no_grad():
            for tensor, value in reversed(graph.before):
                tensor.detach().copy_(value)


capturing: list[Graph] = []


class Stream:
    def wait_stream(self, other: "Stream") -> None:
        pass

    def synchronize(self) -> None:
        pass


class Event:
    """The time of the host; never the same twice."""

    def __init__(self, enable_timing: bool = False):
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        return 1e3 * (end.at - self.at) + 1e-6


def init_process_group(backend: str, *args, **kwargs):
    """Gloo for NCCL; one rank alone is for PyTorch's kernels, which are on CUDA only."""
    if kwargs["world_size"] == 1:
        raise RuntimeError("the fake device has no NCCL")
    return _init_process_group("gloo", *args, **kwargs)


_init_process_group = dist.init_process_group


_mode = OnCpu()
_active = False


def switch(on: bool) -> None:
    """Whether the device is there, in this process and those that it starts."""
    global _active
    if on != _active:
        _mode.__enter__() if on else _mode.__exit__(None, None, None)
    _active = on
    os.environ[VARIABLE] = "on" if on else "off"


def visible() -> bool:
    return _active and os.environ.get("CUDA_VISIBLE_DEVICES") != ""


def install() -> None:
    functions = {
        "is_available": visible,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_name": lambda device=0: PROPERTIES.name,
        "get_device_properties": lambda device=0: PROPERTIES,
        "synchronize": lambda device=None: None,
        "set_sync_debug_mode": lambda mode: None,
        "is_current_stream_capturing": lambda: bool(capturing),
        "_sleep": lambda cycles: None,
        "Stream": Stream,
        "current_stream": lambda device=None: Stream(),
        "stream": contextlib.nullcontext,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": capture,
    }
    for name, function in functions.items():
        setattr(torch.cuda, name, function)
    dist.init_process_group = init_process_group
    switch(os.environ.get(VARIABLE) != "off")


install()
