# SPDX-License-Identifier: Apache-2.0
"""A training loop in syncbn.join of which one rank raises an error, somewhere; test_join.py starts
the ranks."""

import time

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import syncbn

#: The rank that raises, in its third iteration, and how many batches each rank has.
COUNTS = {
    "all go on": (2, (5, 5, 5)),
    "others have ended": (2, (0, 1, 5)),
    "first of two": (0, (5, 1, 5)),
    "middle one": (1, (0, 5, 5)),
}
#: Where it raises.
PLACES = (
    *("loader", "hook of the model", "before the layers", "forward", "layer", "loss"),
    *("end of backward", "between models", "local step", "optimizer", "after the loop"),
)


class Result:
    """An output in an object of which PyTorch knows nothing."""

    def __init__(self, y: torch.Tensor) -> None:
        self.y = y


class Network(nn.Module):
    def __init__(self, wraps: bool) -> None:
        super().__init__()
        self.wraps = wraps
        self.stem, self.first = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.middle, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        y = self.second(self.middle(self.first(self.stem(x)).tanh()))
        return Result(y) if self.wraps else y


class Loop:
    """One rank. models: how many, each in DistributedDataParallel if ddp says so; zero: with a
    ZeroRedundancyOptimizer; wraps: see Result; pause: seconds that the others take for the third
    iteration; timeout: of the layers."""

    def __init__(
        self, rank, counts, place, *, ddp=True, models=1, zero=False, wraps=False, pause=0,
        timeout=None,
    ) -> None:  # fmt: skip
        odd, numbers = COUNTS[counts]
        self.odd, self.batches, self.place = rank == odd, numbers[rank], place
        self.ddp, self.number, self.zero, self.wraps = ddp, models, zero, wraps
        self.pause, self.timeout = pause, timeout
        self.step = 0

    def fail(self, place: str) -> None:
        if self.odd and self.step == 2 and self.place == place:
            raise KeyError("sample 7")

    def fails(self, place: str):
        return lambda *_: self.fail(place)

    def refused(self, _layer, given):
        return given[0].long() if self.odd and self.step == 2 and self.place == "layer" else None

    def network(self) -> nn.Module:
        torch.manual_seed(1)
        model = syncbn.convert_sync_batchnorm(Network(self.wraps), timeout=self.timeout)
        model.stem.register_forward_pre_hook(self.fails("before the layers"))
        model.middle.register_forward_pre_hook(self.fails("forward"))
        model.second.register_forward_pre_hook(self.refused)
        model.stem.weight.register_hook(self.fails("end of backward"))
        if self.ddp:
            model = DistributedDataParallel(model)
        model.register_forward_pre_hook(self.fails("hook of the model"))
        return model

    def run(self) -> None:
        models = [self.network() for _ in range(self.number)]
        parameters = [p for model in models for p in model.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        joined = models
        if self.zero:
            optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)
            optimizer.optim.register_step_pre_hook(self.fails("local step"))
            joined = [*models, optimizer]
        with syncbn.join(*joined):
            for step in range(self.batches):
                self.step = step
                self.fail("loader")
                time.sleep(self.pause if self.step == 2 and not self.odd else 0)
                for model in models:
                    one = self.odd and self.step == 2 and self.place == "one value"
                    y = model(torch.randn(1 if one else 3, 4))
                    y = y.y if self.wraps else y
                    self.fail("loss")
                    y.square().sum().backward()
                    self.fail("between models")
                self.fail("optimizer")
                optimizer.step()
                optimizer.zero_grad()
                if self.step == 1 and self.odd and self.place == "after the loop":
                    break
            self.step = 2
            self.fail("after the loop")
