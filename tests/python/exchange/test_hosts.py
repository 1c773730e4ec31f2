# SPDX-License-Identifier: Apache-2.0
"""Two hosts with two ranks each, shared memory inside and Gloo between, on a link that is cut,
loses and delays packets, and with a host that is stopped: the bits are equal, every rank on both
sides raises in time, and ranks that are alive go on."""

import json
import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch

import host_cases
import host_link
import syncbn
from host_cases import LIMIT, WORLD

WHY_NOT = host_link.why_not()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=f"two hosts: {WHY_NOT}")

#: From a rank's call to its error: two waits, inside the host and between hosts; the question where
#: the others are; what two busy cores need.
IN_TIME = 2 * LIMIT + 10
GONE = {"ExchangeTimeout", "PeerLost"}


class Hosts:
    def __init__(self, folder: str, machines: tuple[int, int]) -> None:
        self.folder, self.number = folder, 0
        script = Path(host_cases.__file__)
        self.processes = [
            host_link.start_host(script, host, folder, machine)
            for host, machine in enumerate(machines)
        ]
        time.sleep(0.5)  # the namespaces
        self.link = host_link.Link(self.processes)
        Path(folder, "link").touch()

    def begin(self, name: str, *arguments) -> None:
        place = Path(self.folder, "do.new")
        place.write_text(json.dumps([name, *arguments]))
        place.rename(Path(self.folder, f"do.{self.number}"))
        self.number += 1

    def end(self, seconds: float) -> list[dict]:
        """What each rank answers."""
        files = [Path(self.folder, f"done.{self.number - 1}.{r}.json") for r in range(WORLD)]
        until = time.monotonic() + seconds
        while not all(f.exists() for f in files) and time.monotonic() < until:
            time.sleep(0.02)
        silent = [r for r, f in enumerate(files) if not f.exists()]
        assert not silent, f"ranks {silent} hang or died"
        return [json.loads(f.read_text()) for f in files]

    def do(self, name: str, *arguments, seconds: float = 60) -> list[str]:
        self.begin(name, *arguments)
        results = self.end(seconds)
        return [f"{result['outcome']} {result['text']}".strip() for result in results]

    def check_steps(self, first: int, number: int, reference: torch.nn.Module) -> None:
        """Steps whose bits are those of one process."""
        assert self.do("steps", first, number) == ["passed"] * WORLD
        found = [torch.load(f"{self.folder}/{first}.{rank}.pt") for rank in range(WORLD)]
        sizes = [len(host_cases.batch(rank, 0)) for rank in range(WORLD)]
        for step in range(number):
            whole = torch.cat([host_cases.batch(rank, first + step) for rank in range(WORLD)])
            y, dx = host_cases.train(reference, whole)
            for rank, (a, b) in enumerate(zip(y.split(sizes), dx.split(sizes), strict=True)):
                assert torch.equal(found[rank][0][step][0], a), f"rank {rank}, step {first + step}"
                assert torch.equal(found[rank][0][step][1], b), f"rank {rank}, step {first + step}"
        for rank in range(WORLD):
            assert torch.equal(found[rank][1], reference.running_mean), f"rank {rank}"
            assert torch.equal(found[rank][2], reference.running_var), f"rank {rank}"

    def check_errors(self, what: str) -> None:
        for rank, result in enumerate(self.end(90)):
            assert result["outcome"] in GONE, f"{what}: rank {rank}: {result}"
            assert result["seconds"] < IN_TIME, f"{what}: rank {rank}: {result}"
            assert f"rank {rank} of {WORLD}" in result["text"], f"{what}: rank {rank}: {result}"

    def ranks_of(self, host: int) -> list[int]:
        """The processes of a host, as they are called outside of it."""
        found, pending = [], [self.processes[host].pid]
        while pending:
            parent = pending.pop()
            children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
            pending += map(int, children)
            found += map(int, children)
        return found

    def signal(self, host: int, number: int) -> None:
        for process in self.ranks_of(host):
            os.kill(process, number)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.link.close()


@pytest.fixture
def hosts(request):
    with tempfile.TemporaryDirectory() as folder:
        one = Hosts(folder, request.param)
        yield one
        one.close()


@pytest.mark.parametrize("hosts", [(0, 0)], indirect=True)
def test_two_containers_of_one_host(hosts):
    """Processes of different PID namespaces cannot watch each other, and share no memory."""
    assert hosts.do("make", LIMIT) == ["shared memory, gloo between nodes"] * WORLD
    hosts.check_steps(0, 3, syncbn.SyncBatchNorm(host_cases.CHANNELS))


@pytest.mark.parametrize("hosts", [(0, 1)], indirect=True)
def test_two_hosts(hosts):
    """One after the other, because a start takes longer than most of it."""
    assert hosts.do("make", LIMIT) == ["shared memory, gloo between nodes"] * WORLD
    reference = syncbn.SyncBatchNorm(host_cases.CHANNELS)
    hosts.check_steps(0, 5, reference)

    hosts.link.loss, hosts.link.delay = 0.05, 0.01
    hosts.check_steps(5, 10, reference)
    hosts.link.loss, hosts.link.delay = 0.0, 0.0

    hosts.signal(1, signal.SIGSTOP)
    hosts.begin("steps", 100, 1)
    time.sleep(2 * LIMIT + 6)
    hosts.signal(1, signal.SIGCONT)
    hosts.check_errors("a host is stopped")
    assert hosts.do("reset") == ["passed"] * WORLD
    assert hosts.do("make", LIMIT) == ["shared memory, gloo between nodes"] * WORLD
    hosts.check_steps(15, 2, syncbn.SyncBatchNorm(host_cases.CHANNELS))

    hosts.link.loss = 1.0
    hosts.begin("steps", 200, 1)
    hosts.check_errors("the link is cut")
    hosts.begin("make", LIMIT + 1)
    hosts.check_errors("the link is cut while a group is made")
