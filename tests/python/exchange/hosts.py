# SPDX-License-Identifier: Apache-2.0
"""Hosts with ranks that run what host_cases.py has, and what every test asks of them."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import host_cases
import host_link
from host_cases import LIMIT

#: From a rank's call to its error: two waits, inside the host and between hosts; the question where
#: the others are; what two busy cores need.
IN_TIME = 2 * LIMIT + 10
GONE = {"ExchangeTimeout", "PeerLost"}
TWO_LEVELS = "shared memory, gloo between nodes"


class Hosts:
    """machines: of each host; hosts of one machine are containers. ranks: how many each has."""

    def __init__(self, folder: str, machines: Sequence[int], ranks: Sequence[int]) -> None:
        self.folder, self.number, self.world = folder, 0, sum(ranks)
        script = Path(host_cases.__file__)
        self.processes = [
            host_link.start_host(script, host, json.dumps(ranks), folder, machine)
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
        files = [Path(self.folder, f"done.{self.number - 1}.{r}.json") for r in range(self.world)]
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
        assert self.do("steps", first, number) == ["passed"] * self.world
        found = [torch.load(f"{self.folder}/{first}.{rank}.pt") for rank in range(self.world)]
        sizes = [len(host_cases.batch(rank, 0)) for rank in range(self.world)]
        for step in range(number):
            whole = torch.cat([host_cases.batch(rank, first + step) for rank in range(self.world)])
            y, dx = host_cases.train(reference, whole)
            for rank, (a, b) in enumerate(zip(y.split(sizes), dx.split(sizes), strict=True)):
                assert torch.equal(found[rank][0][step][0], a), f"rank {rank}, step {first + step}"
                assert torch.equal(found[rank][0][step][1], b), f"rank {rank}, step {first + step}"
        for rank in range(self.world):
            assert torch.equal(found[rank][1], reference.running_mean), f"rank {rank}"
            assert torch.equal(found[rank][2], reference.running_var), f"rank {rank}"

    def check_errors(self, what: str) -> None:
        for rank, result in enumerate(self.end(90)):
            assert result["outcome"] in GONE, f"{what}: rank {rank}: {result}"
            assert result["seconds"] < IN_TIME, f"{what}: rank {rank}: {result}"
            assert f"rank {rank} of {self.world}" in result["text"], (
                f"{what}: rank {rank}: {result}"
            )

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
