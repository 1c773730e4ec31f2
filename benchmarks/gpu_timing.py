# SPDX-License-Identifier: Apache-2.0
"""Times of work on a GPU: within replays of CUDA graphs, which no host holds up, and of eager calls
as a host makes them. Also which kernels ran, by PyTorch's profiler."""

import statistics
import time
from collections.abc import Callable

import torch

#: Given the number of the call.
Work = Callable[[int], object]
REPLAYS, WARM_UP = 9, 2
MICROSECONDS_AHEAD = 2_000  # that the device sleeps, so that the host enqueues all replays


def graph_times(work: Work, calls: int, stream: torch.cuda.Stream) -> list[float]:
    """Microseconds of a call, of each replay of a graph of so many calls. All that the work is made
    of was made on the stream, too: backward runs where forward ran."""
    with torch.cuda.stream(stream):
        work(0)  # loads its kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # NCCL's own thread asks CUDA meanwhile, which the usual mode forbids to all threads.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for i in range(calls):
            work(i)
    marks = []
    with torch.cuda.stream(stream):
        torch.cuda._sleep(MICROSECONDS_AHEAD * 2_000)  # at about 2 GHz
        for _ in range(WARM_UP + REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            marks.append((start, end))
    torch.cuda.synchronize()
    return [1e3 * start.elapsed_time(end) / calls for start, end in marks[WARM_UP:]]


def eager_times(work: Work, calls: int, stream: torch.cuda.Stream) -> list[float]:
    """Microseconds of a call, host and device together."""
    times = []
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP + REPLAYS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for i in range(calls):
                work(i)
            torch.cuda.synchronize()
            times.append(1e6 * (time.perf_counter() - start) / calls)
    return times[WARM_UP:]


def kernel_times(work: Work, calls: int) -> dict[str, float]:
    """Microseconds on the device of each kernel of a call, by its name."""
    cuda = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[cuda]) as profile:
        for i in range(calls):
            work(i)
        torch.cuda.synchronize()
    averages = profile.key_averages()
    return {a.key: a.self_device_time_total / calls for a in averages if a.self_device_time_total}


def row(times: list[float], moved: int, copied: float | None) -> dict[str, object]:
    """Of a table; moved: bytes; copied: bytes a microsecond of the copy."""
    low, middle, high = statistics.quantiles(times, n=4)
    return {
        "us": round(middle, 3),
        "quartiles": [round(low, 3), round(high, 3)],
        **rates(middle, moved, copied),
    }


def rates(microseconds: float, moved: int, copied: float | None) -> dict[str, object]:
    rate = moved / microseconds if microseconds > 0 else None
    return {
        "bytes": moved,
        "GB/s": None if rate is None else round(rate / 1e3, 1),
        "of copy": None if rate is None or copied is None else round(rate / copied, 3),
    }
