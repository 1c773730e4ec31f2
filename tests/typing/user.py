# SPDX-License-Identifier: Apache-2.0
"""A user's program for `mypy --strict`, which reads what is installed. It is not run.

Where an error is expected stands a `type: ignore`: one that is not needed is an error as well.
"""

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import syncbn
from syncbn import errors, functional, graph, ops, parallel


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = syncbn.SyncBatchNorm(
            8,
            1e-5,
            None,
            device="cpu",
            dtype=torch.float32,
            affine_grad="global",
            activation="leaky_relu",
            statistics="welford",
            timeout=30,
            engine="process_group",
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.norm.forward(x, residual=x, mask=None)


def models(net: Net) -> None:
    assert_type(syncbn.convert_sync_batchnorm(net, group="node", timeout=10), Net)
    assert_type(syncbn.SyncBatchNorm.convert_sync_batchnorm(net), Net)
    assert_type(syncbn.set_group(net, group_size=2, engine="auto"), Net)
    assert_type(syncbn.prepare(net), Net)
    assert_type(syncbn.revert_sync_batchnorm(net), Net)
    assert_type(syncbn.report(net, strict=True)[0].count, int | None)
    syncbn.register_conversion(nn.BatchNorm2d, lambda layer, sync: sync(layer, activation="relu"))
    syncbn.check(net)
    net.norm.activation = "relu"
    with syncbn.join(net):
        loss = syncbn.skip(net)
    assert_type(loss, Tensor)
    assert_type(syncbn.__version__, str)
    assert_type(syncbn.cpu_instruction_set(), str)


def tensors(x: Tensor, layer: syncbn.SyncBatchNorm) -> None:
    assert_type(layer.forward(x), Tensor)
    assert_type(layer.forward([x, x]), list[Tensor])
    assert_type(functional.sync_batch_norm(x, training=True, activation="relu"), Tensor)
    assert_type(parallel.all_reduce(x), Tensor)
    assert_type(parallel.all_reduce([x, x]), list[Tensor])
    assert_type(ops.batch_norm(x, x, x, None, None, x, is_infer=True).y, Tensor)


def others(net: Net, x: Tensor) -> None:
    try:
        outputs = parallel.SelfDataParallel(net, ["cpu"] * 2).forward(x)
    except (errors.DivergenceError, syncbn.ExchangeTimeout, syncbn.PeerLost) as error:
        print(error)
    else:
        print(len(outputs))
    network = graph.Network(net, convert=True)
    network.train(x)
    network.infer(x)


def refused(net: Net, x: Tensor) -> None:
    syncbn.SyncBatchNorm(8, activation="rellu")  # type: ignore[arg-type]
    syncbn.SyncBatchNorm(8, statistics="welfrod")  # type: ignore[arg-type]
    syncbn.SyncBatchNorm(8, affine_grad="shared")  # type: ignore[arg-type]
    syncbn.SyncBatchNorm(8, engine="gloo")  # type: ignore[arg-type]
    functional.sync_batch_norm(x, activation="rellu")  # type: ignore[arg-type]
    syncbn.convert_sync_batchnorm(net, group="nodes")  # type: ignore[arg-type]
    syncbn.convert_sync_batchnorm(net, engine="gloo")  # type: ignore[arg-type]
    syncbn.set_group(net, group="nodes")  # type: ignore[arg-type]
    net.norm.activation = "rellu"  # type: ignore[assignment]
