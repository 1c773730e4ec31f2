# SPDX-License-Identifier: Apache-2.0
"""Ranks on one machine between which the system puts a wall: they exchange with the right bits, and
the report says why not through shared memory. Needs root."""

import codecs
import ctypes
import datetime
import json
import os
import platform
import re
import struct
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import syncbn
from rank_runs import free_port, quick_context, run_ranks, written

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_MOUNTS, _NEW_PROCESSES = 0x00020000, 0x20000000
_PRIVATE, _READ_ONLY, _REMOUNT, _BIND = 1 << 18 | 1 << 14, 1, 32, 4096
_NOBODY = 65534
#: System calls of x86-64.
_CALLS = {"pidfd_open": 434, "memfd_create": 319}


def _call(name: str, *arguments) -> None:
    if getattr(_LIBC, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    texts = (text.encode() for text in (source, target, kind))
    _call("mount", *texts, ctypes.c_ulong(flags), options.encode())


def _own_mounts(more: int = 0) -> None:
    _call("unshare", _NEW_MOUNTS | more)
    _mount("none", "/", "", _PRIVATE)


def _step(rank: int, world: int, **options) -> tuple[str, str, torch.Tensor]:
    """In a group of its own: how it was exchanged, and the output."""
    limit = datetime.timedelta(seconds=30)
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=limit, **options)
    layer = syncbn.SyncBatchNorm(4)
    for _ in range(2):
        y = layer(_x(rank).requires_grad_())
        y.sum().backward()
    (row,) = syncbn.report(layer)
    dist.barrier()
    dist.destroy_process_group()
    return row.engine, row.note, y


def _become_nobody() -> None:
    _step(0, 1, store=dist.HashStore())  # Python's files may be closed to others: reads them first
    codecs.lookup("ascii")
    os.setgroups([])
    os.setgid(_NOBODY)
    os.setuid(_NOBODY)


def _in_a_container() -> None:
    """Goes on in a child, the first process of its namespace."""
    _own_mounts(_NEW_PROCESSES)
    child = os.fork()
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    _mount("proc", "/proc", "proc", 0)


def _hidden() -> None:
    """As another user, who sees in /proc only what is its own."""
    _own_mounts()
    _mount("proc", "/proc", "proc", 0, "hidepid=2")
    _become_nobody()


def _without(call: str) -> None:
    """A filter (seccomp) that refuses the system call with EPERM."""
    program = [
        (0x20, 0, 0, 0),  # the call's number
        (0x15, 0, 1, _CALLS[call]),
        (0x06, 0, 0, 0x00050000 | 1),  # an error, number 1
        (0x06, 0, 0, 0x7FFF0000),  # allowed
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    filters = struct.pack("H6xP", len(program), ctypes.addressof(code))
    _call("prctl", 38, 1, 0, 0, 0)  # no new privileges
    _call("prctl", 22, 2, ctypes.create_string_buffer(filters), 0, 0)


def _read_only() -> None:
    _own_mounts()
    _mount("none", "/dev/shm", "", _REMOUNT | _BIND | _READ_ONLY)


#: wall: (the rank behind it, what puts it there, what the report says; "" for shared memory)
WALLS = {
    "another user": (1, _become_nobody, r"rank 0: its memory /proc/.* cannot be opened"),
    "hidden processes": (1, _hidden, r"rank 0: process \d+ cannot be seen in /proc"),
    "a container": (1, _in_a_container, "each rank is the only one of its node or container"),
    "no pidfd_open": (1, lambda: _without("pidfd_open"), r"process \d+ cannot be watched: "),
    "no memfd_create": (
        *(0, lambda: _without("memfd_create")),
        r"rank 0 cannot share memory: memfd_create: Operation not permitted",
    ),
    "read-only /dev/shm": (1, _read_only, ""),
}


def _why_not() -> str:
    if sys.platform != "linux" or platform.machine() != "x86_64" or os.geteuid() != 0:
        return "needs root on Linux on x86-64"
    child = os.fork()
    if child == 0:
        try:
            _own_mounts(_NEW_PROCESSES)
            os._exit(0)
        except OSError:
            os._exit(1)
    return "may not make namespaces" if os.waitpid(child, 0)[1] else ""


def _x(rank: int) -> torch.Tensor:
    return torch.randn(3 + rank, 4, generator=torch.Generator().manual_seed(rank))


def _rank_main(rank: int, wall: str, port: int, folder: str) -> None:
    behind, put, _ = WALLS[wall]
    out = os.open(Path(folder, f"{rank}.json"), os.O_WRONLY | os.O_CREAT)
    if rank == behind:
        put()
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=30)
    engine, note, y = _step(
        rank, 2, store=dist.TCPStore("127.0.0.1", port, 2, rank == 0, timeout=limit)
    )
    os.write(out, json.dumps([engine, note, y.tolist()]).encode())


@pytest.mark.parametrize("wall", WALLS)
def test_ranks_exchange_and_say_why_not_through_shared_memory(wall):
    if why := _why_not():
        pytest.skip(f"walls between processes: {why}")
    with tempfile.TemporaryDirectory() as folder:
        codes = run_ranks(quick_context(), _rank_main, 2, (wall, free_port(), folder), 60)
        results = written(folder, 2)
    assert codes == [0, 0], results
    expected = syncbn.SyncBatchNorm(4, sync=False)(torch.cat([_x(0), _x(1)])).split([3, 4])
    text = WALLS[wall][2]
    for rank, (engine, note, y) in results.items():
        assert torch.equal(torch.tensor(y), expected[rank])
        over_gloo = "gloo between nodes" if wall == "a container" else "gloo"
        assert engine == (over_gloo if text else "shared memory")
        assert re.search(text, note) if text else note == ""
