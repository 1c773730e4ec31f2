# SPDX-License-Identifier: Apache-2.0
"""One rank of a round of test_fault_storm.py: a small net trains, and one rank, the odd one, has a
fault at a moment that the round says.

The test's process delivers signals, so that they come from outside and at any time, and says when
all ranks have an outcome: before that none of them ends.
"""

import datetime
import re
import signal
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import syncbn
from fault_rounds import LIMIT, Round
from rank_runs import join_group
from support import raises
from syncbn.exchange import failing

CHANNELS = 4
#: Of large tensors: all but samples. With so many samples both directions are streamed.
LARGE, SAMPLES = (32, 3200), 21
PATHS = ("stem", "middle", "head")
#: Where a step comes by, and the moments of a round that are then. A signal "any" time later is
#: asked for at the start.
MOMENTS = [(m, m) for m in ("start", "forward", "between", "backward")] + [("start", "any")]


class OwnError(Exception):
    """That of the odd rank's training script."""


class Net(nn.Module):
    def __init__(self, layers: int, make) -> None:
        super().__init__()
        for path in PATHS[:layers]:
            setattr(self, path, make())

    def forward(self, x, order=None, before=lambda index, x: x):
        """before: gives a layer its input; called in front of each layer."""
        for index, path in enumerate(order or list(self._modules)):
            x = before(index, x)
            x = F.relu(self._modules[path](x) + 0.5)
        return x


class Rank:
    def __init__(self, drawn: Round, rank: int, group: dist.ProcessGroup, pipe) -> None:
        self.drawn, self.rank, self.group, self.pipe = drawn, rank, group, pipe
        self.odd = rank == drawn.odd
        options = {"process_group": group, "timeout": LIMIT}
        make = nn.BatchNorm1d
        if drawn.direct:
            make = lambda channels: syncbn.SyncBatchNorm(channels, **options)  # noqa: E731
        self.channels = LARGE[0] if drawn.large else CHANNELS
        self.model = Net(drawn.layers, lambda: make(self.channels))
        self.own = dict(self.model._modules)  # of which the fault may replace one
        #: (y, dx) of the steps that this rank took as all others
        self.results: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.backwards = 0
        #: when this rank last came on
        self.mark = time.monotonic()
        self.pending = False

    # What the ranks bring.

    def x(self, number: int, rank: int) -> torch.Tensor:
        seed = self.drawn.index * 1_000_000 + number * 10 + rank
        shape = (SAMPLES + rank, *LARGE) if self.drawn.large else (3 + rank, CHANNELS)
        return torch.randn(shape, generator=torch.Generator().manual_seed(self.drawn.seed + seed))

    # The fault.

    def signal(self, name: str, delay: float | None) -> None:
        """Asks for a signal. delay None: now, before anything else happens here."""
        self.pending = True
        self.pipe.send(("signal", {"name": name, "delay": delay or 0.0}))
        if delay is None:
            self.received()

    def received(self) -> None:
        """Waits until the signal, if one was asked for, has been sent and has come."""
        if self.pending:
            assert self.pipe.recv() == "sent"
            time.sleep(1 if self.drawn.fault == "interrupted" else 0)
            self.pending = False

    def fail_at(self, moment: str) -> None:
        """The faults that may come at any moment of the training."""
        drawn = self.drawn
        if not (self.odd and self.faulty and (moment, drawn.moment) in MOMENTS):
            return
        if drawn.fault in ("killed", "stopped", "interrupted"):
            self.signal(drawn.fault, drawn.delay if drawn.moment == "any" else None)
        elif drawn.fault == "raises":
            raise OwnError("of this rank alone")
        elif drawn.fault.startswith("late"):
            time.sleep(drawn.delay)

    # The training.

    def form(self) -> None:
        """Converts, on all ranks together."""
        if not self.drawn.direct:
            syncbn.convert_sync_batchnorm(self.model, self.group, timeout=LIMIT)

    def train(self) -> None:
        drawn = self.drawn
        self.faulty = drawn.forming
        self.fail_at("start")
        self.form()
        for number in range(drawn.steps):
            self.faulty = number == drawn.step
            if not drawn.forming:
                self.fail_at("start")
            self.step(number, drawn.fault if self.odd and self.faulty else "")
        self.received()

    def step(self, number: int, fault: str) -> None:
        """fault: of the calls of this step."""
        drawn, order = self.drawn, list(self.model._modules)
        chosen = order[drawn.layer]
        if fault == "skips a layer":
            order.remove(chosen)
        elif fault == "other order":
            other = (drawn.layer + 1) % len(order)
            order[drawn.layer], order[other] = order[other], chosen
        elif fault == "extra call" and drawn.moment == "forward":
            order.insert(drawn.layer, chosen)
        elif fault == "other channels":
            options = {"process_group": self.group, "timeout": LIMIT}
            setattr(self.model, chosen, syncbn.SyncBatchNorm(CHANNELS + 1, **options))
        elif fault == "other eps":
            self.own[chosen].eps = 0.01
        elif fault == "evaluation mode":
            self.model.eval()
        elif fault == "evaluation mode of a layer":
            self.own[chosen].eval()

        def before(index: int, x: torch.Tensor) -> torch.Tensor:
            if index == drawn.layer:
                self.fail_at("forward")
                if fault == "other dtype":
                    x = x.double()
                if fault == "other channels":
                    x = F.pad(x, (0, 1))
            if index == drawn.layer + 1 and fault == "other channels":
                x = x[:, :CHANNELS]
            if x.requires_grad:
                x.register_hook(lambda dx: came_back(index, dx))
            self.mark = time.monotonic()
            return x

        def came_back(index: int, dx: torch.Tensor) -> None:
            self.mark = time.monotonic()
            self.backwards += 1
            if index == drawn.layer:
                self.fail_at("backward")

        x = self.x(number, self.rank)
        x.requires_grad_(not (drawn.fault == "gradient on some ranks" and self.odd))
        with torch.set_grad_enabled(fault != "no gradients"):
            y = self.model(x, order, before)
        self.fail_at("between")
        self.mark = time.monotonic()
        if fault == "no gradients":
            self.results.append((y, None))
            return
        y.square().sum().backward()
        if self.own[chosen].training:
            self.results.append((y.detach(), x.grad))
        self.mark = time.monotonic()
        if fault == "extra call" and drawn.moment == "after":
            self.own[chosen](self.x(number, self.rank))

    # What must have come of it.

    def forwards(self) -> int:
        return sum(int(layer.num_batches_tracked) for layer in self.own.values())

    def check(self) -> None:
        """The right bits in all steps that were taken, and running statistics that are whole: as
        after so many forwards of layers in one process."""
        left = self.forwards()
        alone = Net(self.drawn.layers, lambda: syncbn.SyncBatchNorm(self.channels, sync=False))

        def stop(index: int, x: torch.Tensor) -> torch.Tensor:
            nonlocal left
            left -= 1
            if left < 0:
                raise StopIteration
            return x

        number = 0
        try:
            while left:
                self.compare(alone, number, stop, *self.results[number : number + 1])
                number += 1
        except StopIteration:
            pass
        assert len(self.results) <= number, f"{len(self.results)} steps, statistics of {number}"
        for path, layer in self.own.items():
            for name, value in alone._modules[path].named_buffers():
                assert torch.equal(layer.get_buffer(name), value), f"{path}.{name}"

    def compare(self, alone, number, before=lambda index, x: x, result=None) -> None:
        """One step in one process, compared with this rank's result, if there is one."""
        shares = [self.x(number, rank) for rank in range(self.drawn.world)]
        x = torch.cat(shares).requires_grad_()
        y = alone(x, before=before)
        y.square().sum().backward()
        if result is not None:
            begin = sum(map(len, shares[: self.rank]))
            own = slice(begin, begin + len(shares[self.rank]))
            assert torch.equal(result[0], y[own]), f"y of step {number}"
            if result[1] is not None:
                assert torch.equal(result[1], x.grad[own]), f"dx of step {number}"

    def stays_broken(self) -> None:
        """After a time-out or a loss the next call is an error at once, which changes nothing."""
        began, forwards = time.monotonic(), self.forwards()
        layer, x = next(iter(self.own.values())), self.x(self.drawn.steps, self.rank)
        text = r"call syncbn.reset_groups\(\) on every rank to go on"
        raises(syncbn.PeerLost, text, layer, x)
        assert self.forwards() == forwards and time.monotonic() < began + LIMIT

    def go_on(self) -> None:
        """All ranks are alive: they make the groups anew, and the next step is right."""
        for path, layer in self.own.items():
            setattr(self.model, path, layer)
            layer.eps = 1e-5
        self.model.train()
        if not self.drawn.direct:
            syncbn.reset_groups()
            self.form()
        syncbn.reset_groups(self.model)
        alone = Net(self.drawn.layers, lambda: syncbn.SyncBatchNorm(self.channels, sync=False))
        alone.load_state_dict(self.model.state_dict())
        self.results, self.faulty = [], False
        self.step(self.drawn.steps, "")
        self.compare(alone, self.drawn.steps, result=self.results[0])
        for own, value in zip(self.model.buffers(), alone.buffers()):
            assert torch.equal(own, value), "running statistics of the step after reset_groups"


def main(drawn: Round, rank: int, port: int, pipe) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    failing.INTERVAL = 0.3
    join_group(rank, drawn.world, port, engine=drawn.engine)
    own = Rank(drawn, rank, dist.new_group(timeout=datetime.timedelta(seconds=LIMIT)), pipe)
    pipe.send(("ready", True))
    pipe.recv()
    outcome, text = "passed", ""
    began = own.mark = time.monotonic()
    try:
        own.train()
    except BaseException as error:
        outcome, text = type(error).__name__, str(error)
    result = {"outcome": outcome, "text": text, "wrong": "", "seconds": time.monotonic() - own.mark}
    result |= {"forwards": own.forwards(), "backwards": own.backwards}
    result["trained"] = time.monotonic() - began
    _report(result, own.check)
    if outcome in ("ExchangeTimeout", "PeerLost") and re.match(r"\w+, call", text):
        _report(result, own.stays_broken)
    pipe.send(("outcome", result))
    while (word := pipe.recv()) == "sent":  # which an interrupt kept from being read
        pass
    if word == "go on":
        began, after = time.monotonic(), {"wrong": ""}
        _report(after, own.go_on)
        pipe.send(("after", after | {"seconds": time.monotonic() - began}))
        pipe.recv()


def _report(result: dict, check) -> None:
    try:
        check()
    except BaseException as error:
        where = error.__traceback__
        while where.tb_next is not None:
            where = where.tb_next
        name = re.sub(r".*/", "", where.tb_frame.f_code.co_filename)
        result["wrong"] = f"{type(error).__name__}: {error} ({name}:{where.tb_lineno})"
