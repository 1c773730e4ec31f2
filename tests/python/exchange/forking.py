# SPDX-License-Identifier: Apache-2.0
"""Children of a test's process, and what a process holds."""

import os
import signal
import threading
import time
import traceback

import torch


def passes_in_child(function, seconds: int = 20) -> None:
    """Runs the function in a forked child, which ends as multiprocessing's do, and raises what
    went wrong there."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(seconds)  # ends a child that hangs
        try:
            function()
            text = "passed"
        except BaseException:
            text = traceback.format_exc()
        os.write(theirs, text.encode())
        os._exit(0)
    os.close(theirs)
    with open(ours, encoding="utf-8") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    assert said == "passed" and status == 0, f"status {status}: {said}"


def in_threads(function, number: int) -> None:
    """Runs function(i) in so many threads at once."""
    threads = [threading.Thread(target=function, args=(i,)) for i in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def train(layer: torch.nn.Module, steps: int = 3, seed: int = 0, samples: int = 5) -> list:
    """Training steps; all that they give, and the layer's state."""
    generator = torch.Generator().manual_seed(seed)
    results = []
    for _ in range(steps):
        x = torch.randn(samples, layer.num_features, 3, generator=generator, requires_grad=True)
        y = layer(x)
        wanted = (x, *layer.parameters())
        results += [y.detach(), *torch.autograd.grad(y.square().sum(), wanted)]
    return results + [buffer.clone() for buffer in layer.buffers()]


def equal(a: list, b: list) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def settled_held() -> dict[str, int]:
    """held() when the threads of groups that are gone have ended."""
    seen = [held()]
    while len(seen) < 50 and (len(seen) < 4 or any(one != seen[-1] for one in seen[-4:])):
        time.sleep(0.1)
        seen.append(held())
    return seen[-1]


def held() -> dict[str, int]:
    """Descriptors, threads, mapped groups and named shared memory of this process."""
    with open("/proc/self/maps") as maps:
        groups = sum("memfd:syncbn" in line for line in maps)
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "groups": groups,
        "names": sum("syncbn" in name for name in os.listdir("/dev/shm")),
    }
