# SPDX-License-Identifier: Apache-2.0
"""Groups that change in place (`reconfigure` of PyTorch 2.14 and later): processes join, leave,
change places and are killed, and each step has the bits of one process over the samples of those
that take part. 30 rounds; SYNCBN_CHANGES=300 plays more, from SYNCBN_SEED."""

import datetime
import io
import os
import pickle
import random
import signal
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import syncbn
from rank_runs import new_store, quick_context

pytestmark = pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "reconfigure"), reason="PyTorch 2.14 brought reconfigure"
)
LIMIT = datetime.timedelta(seconds=10)


class Round(NamedTuple):
    """members: processes, by rank. source: the one whose state all take. killed: the process that
    ends, and where in the first step; None: nobody does."""

    number: int
    members: list[int]
    source: int
    killed: tuple[int, str] | None


def draw(slots: int) -> list[Round]:
    """Rounds of processes, some of which are replaced after they were killed."""
    chosen = random.Random(int(os.environ.get("SYNCBN_SEED", "1")))
    living, started = list(range(slots)), slots
    drawn: list[Round] = []
    trained: list[int] = []  # of the round before
    for number in range(int(os.environ.get("SYNCBN_CHANGES", "30"))):
        members = chosen.sample(living, chosen.randint(1 if number % 7 == 3 else 2, len(living)))
        if trained and not set(trained) & set(members):
            members[0] = chosen.choice(trained)
        source = next((m for m in members if m in trained), members[0])
        killed = None
        if len(members) > 1 and number % 3 == 2:
            gone = chosen.choice(members)
            killed = gone, chosen.choice(["before", "forward", "backward"])
            living[living.index(gone)], started = started, started + 1
        drawn.append(Round(number, members, source, killed))
        trained = [m for m in members if killed is None or m != killed[0]]
    return drawn


def model(**options) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.BatchNorm2d(3))
    return syncbn.convert_sync_batchnorm(net, **options)


def step(net: nn.Module, now: Round, number: int, process: int) -> None:
    """A training step, whose bits are those of one process over the samples of the members."""
    one = model(sync=False)
    one.load_state_dict(net.state_dict())
    random = torch.Generator().manual_seed(10 * now.number + number)
    batches = [torch.randn(1 + m % 3, 3, 2, 5, generator=random) for m in now.members]
    place = now.members.index(process)

    def die(where: str) -> None:
        if number == 0 and now.killed == (process, where):
            os.kill(os.getpid(), signal.SIGKILL)

    x, whole = batches[place].clone().requires_grad_(), torch.cat(batches).requires_grad_()
    die("before")
    y = net[0](x)
    die("forward")
    y = net[1:](y)
    die("backward")
    y.square().sum().backward()
    wanted = one(whole)
    wanted.square().sum().backward()
    sizes = [len(b) for b in batches]
    assert torch.equal(y, wanted.split(sizes)[place]), "y"
    assert torch.equal(x.grad, whole.grad.split(sizes)[place]), "dx"
    for (name, value), other in zip(net.state_dict().items(), one.state_dict().values()):
        assert torch.equal(value, other), name


def change(net: nn.Module, store: dist.Store, now: Round, process: int) -> None:
    """Reconfigures the group, over a store that all have; then all take a trained member's state,
    if there is one."""
    place, group = dist.PrefixStore(f"round {now.number}", store), dist.group.WORLD
    place.set(str(now.members.index(process)), group.get_reconfigure_handle())
    options = dist.distributed_c10d.ReconfigureOptions()
    options.uuid, options.timeout = 1000 + now.number, LIMIT
    options.handles = [place.get(str(r)).decode() for r in range(len(now.members))]
    group.reconfigure(options).wait()
    if process == now.source:
        written = io.BytesIO()
        torch.save(net.state_dict(), written)
        place.set("state", written.getvalue())
    net.load_state_dict(torch.load(io.BytesIO(place.get("state"))))


def main(process: int, port: int, rounds: list[Round]) -> None:
    """Takes part in the rounds that have the process, and tells the store what came of each."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(minutes=5))
    options = {"rank": process, "world_size": process + 1, "timeout": LIMIT}
    dist.init_process_group("gloo", store=store, enable_reconfigure=True, **options)
    net = model()
    for now in rounds:
        if process not in now.members:
            continue
        store.wait([f"begin {now.number}"], datetime.timedelta(minutes=5))
        errors = []
        try:
            change(net, store, now, process)
            for number in range(2):
                step(net, now, number, process)
        except BaseException as error:
            known = isinstance(error, (syncbn.PeerLost, syncbn.ExchangeTimeout))
            errors.append(f"{'' if known else 'wrong: '}{type(error).__name__}: {error}")
        store.set(f"came {now.number} {process}", pickle.dumps(errors))
    os._exit(0)


@pytest.mark.parametrize("slots", (2, 3))
def test_processes_join_leave_and_are_killed(slots):
    store, rounds, processes = new_store(), draw(slots), {}
    try:
        for now in rounds:
            for process in {*range(slots), *now.members} - processes.keys():
                arguments = (process, store.port, rounds)
                processes[process] = quick_context().Process(
                    target=main, args=arguments, daemon=True
                )
                processes[process].start()
            store.set(f"begin {now.number}", "")
            for own, process in enumerate(now.members):
                if now.killed is not None and process == now.killed[0]:
                    processes[process].join(60)
                    assert processes[process].exitcode == -signal.SIGKILL, now
                    continue
                key = f"came {now.number} {process}"
                store.wait([key], datetime.timedelta(seconds=90))
                errors = pickle.loads(store.get(key))
                assert len(errors) == (now.killed is not None), (now, process, errors)
                for error in errors:
                    lost = f"rank {now.members.index(now.killed[0])}"
                    assert f"rank {own} of {len(now.members)}" in error and lost in error, error
                    assert not error.startswith("wrong"), error
    finally:
        for one in processes.values():
            one.kill()
