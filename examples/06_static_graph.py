# SPDX-License-Identifier: Apache-2.0
"""A training step as one static graph, and a model without batch norm for inference.

One network is trained three times from the same weights on the same data: eagerly, through
torch.compile without graph breaks, and as a graph that torch.fx traced. The weights must have the
same bits. Then PyTorch folds its batch norms into the convolutions. Run it alone, or on several
ranks:

    python examples/06_static_graph.py
    torchrun --nproc-per-node 2 examples/06_static_graph.py
"""

import copy
import os
import sys

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.fx.experimental.optimization import fuse

import syncbn


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, groups=2),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 4),
    )
    # After init_process_group: a compiled step cannot make the group of its exchanges.
    return syncbn.convert_sync_batchnorm(model)


def train(model: nn.Module, parameters: list[nn.Parameter], rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for _ in range(3):
        x = torch.randn(3 + rank, 3, 12, 12, generator=generator)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if dist.is_initialized():
            for parameter in parameters:
                dist.all_reduce(parameter.grad)
        optimizer.step()


def same_bits(a: nn.Module, b: nn.Module) -> bool:
    theirs = b.state_dict()
    return all(torch.equal(value, theirs[name]) for name, value in a.state_dict().items())


def check(what: str, passed: bool) -> bool:
    print(f"{what}: {'yes' if passed else 'NO'}")
    return passed


def main() -> int:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0

    eager, compiled = network(), network()
    traced = fx.symbolic_trace(network())
    train(eager, list(eager.parameters()), rank)
    step = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    train(step, list(compiled.parameters()), rank)
    train(traced, list(traced.parameters()), rank)
    passed = check("compiled training has the eager bits", same_bits(eager, compiled))
    passed &= check("traced training has the eager bits", same_bits(eager, traced))

    eager.double()
    plain = syncbn.revert_sync_batchnorm(copy.deepcopy(eager)).eval()
    folded = fuse(plain)
    x = torch.randn(5, 3, 12, 12, dtype=torch.float64)
    with torch.no_grad():
        expected, got = copy.deepcopy(eager).eval()(x), folded(x)
    # Two layers with at most 72 products an output, each way at most 84 roundings of 2^-53 relative
    # to magnitudes far below 1000: together below 4e-11.
    passed &= check("folded output is close", bool((expected - got).abs().max() <= 4e-11))
    operators = [
        str(node.target)
        for node in torch.export.export(folded, (x,)).graph.nodes
        if node.op == "call_function"
    ]
    passed &= check("exported without batch norm", not any("norm" in name for name in operators))
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
