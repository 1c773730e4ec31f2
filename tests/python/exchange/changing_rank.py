# SPDX-License-Identifier: Apache-2.0
"""What a process does whose group changes in place, in test_changing_groups.py."""

import datetime
import io
import os
import pickle
import random
import signal
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import syncbn

LIMIT = datetime.timedelta(seconds=10)
STEPS = 2


class Round(NamedTuple):
    """members: processes, by rank. source: the one whose state all take. killed: the process that
    ends, and where in the first step; None: nobody does."""

    number: int
    members: list[int]
    source: int
    killed: tuple[int, str] | None


def draw(seed: int, rounds: int, slots: int) -> list[Round]:
    """Rounds in which processes join, leave, change places, and are replaced after they were
    killed. Process `p` is the replica `p % slots`."""
    chosen = random.Random(seed)
    living, started = list(range(slots)), slots
    drawn: list[Round] = []
    trained: list[int] = []  # of the round before
    for number in range(rounds):
        members = chosen.sample(living, chosen.randint(1 if number % 7 == 3 else 2, len(living)))
        if trained and not set(trained) & set(members):
            members[0] = chosen.choice(trained)
        known = [m for m in members if m in trained] or members
        killed = None
        if len(members) > 1 and number % 3 == 2:
            gone = chosen.choice(members)
            killed = gone, chosen.choice(["before", "forward", "backward"])
            living.remove(gone)
            living.append(started)
            started += 1
        drawn.append(Round(number, members, known[0], killed))
        trained = [m for m in members if killed is None or m != killed[0]]
    return drawn


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.BatchNorm2d(3))


def batch(number: int, step: int, process: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10_000 * number + 100 * step + process)
    return torch.randn(1 + process % 3, 3, 2, 5, generator=generator)


def alone(state: dict, batches: list[torch.Tensor]) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """The same step of one process over everybody's samples."""
    one = syncbn.convert_sync_batchnorm(model(), sync=False)
    one.load_state_dict(state)
    x = torch.cat(batches).detach().requires_grad_()
    y = one(x)
    y.square().sum().backward()
    return one, y.detach(), x.grad


def step(net: nn.Module, now: Round, number: int, process: int) -> None:
    """A training step, whose bits are those of one process over the samples of the members."""
    state = {name: value.clone() for name, value in net.state_dict().items()}
    batches = [batch(now.number, number, m) for m in now.members]
    place = now.members.index(process)
    first = sum(len(b) for b in batches[:place])
    mine = slice(first, first + len(batches[place]))
    ends = now.killed is not None and now.killed[0] == process and number == 0
    x = batches[place].requires_grad_()

    def die(where: str) -> None:
        if ends and now.killed[1] == where:
            os.kill(os.getpid(), signal.SIGKILL)

    die("before")
    y = net[0](x)
    die("forward")
    y = net[2](net[1](y))
    die("backward")
    y.square().sum().backward()
    one, wanted, dx = alone(state, batches)
    assert torch.equal(y, wanted[mine]), "y"
    assert torch.equal(x.grad, dx[mine]), "dx"
    for (name, value), other in zip(net.state_dict().items(), one.state_dict().values()):
        assert torch.equal(value, other), name


def reconfigure(group: dist.ProcessGroup, store: dist.Store, now: Round, process: int) -> None:
    """As torchft does it, over a store that all processes have."""
    place = dist.PrefixStore(f"round {now.number}", store)
    rank = now.members.index(process)
    place.set(str(rank), group.get_reconfigure_handle())
    options = dist.distributed_c10d.ReconfigureOptions()
    options.uuid, options.timeout = 1000 + now.number, LIMIT
    options.handles = [place.get(str(r)).decode() for r in range(len(now.members))]
    group.reconfigure(options).wait()


def heal(net: nn.Module, store: dist.Store, now: Round, process: int) -> None:
    """All members take the state of one that has trained, if one has."""
    key = f"state {now.number}"
    if process == now.source:
        written = io.BytesIO()
        torch.save(net.state_dict(), written)
        store.set(key, written.getvalue())
    else:
        net.load_state_dict(torch.load(io.BytesIO(store.get(key))))


def main(process: int, port: int, rounds: list[Round]) -> None:
    """Takes part in the rounds that have the process, and tells the store what came of each."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(minutes=5))
    dist.init_process_group(
        "gloo",
        store=store,
        rank=process,
        world_size=process + 1,
        timeout=LIMIT,
        enable_reconfigure=True,
    )
    group = dist.group.WORLD
    net = syncbn.convert_sync_batchnorm(model())
    for now in rounds:
        if process not in now.members:
            continue
        store.wait([f"begin {now.number}"], datetime.timedelta(minutes=5))
        errors: list[str] = []
        try:
            reconfigure(group, store, now, process)
            heal(net, store, now, process)
            if now.number % 5 == 4:  # nobody needs it, and it does no harm
                syncbn.reset_groups(net)
            for number in range(STEPS):
                step(net, now, number, process)
        except (syncbn.PeerLost, syncbn.ExchangeTimeout) as error:
            errors.append(f"{type(error).__name__}: {error}")
        except BaseException as error:
            errors.append(f"wrong: {type(error).__name__}: {error}")
        store.set(f"came {now.number} {process}", pickle.dumps(errors))
    os._exit(0)
