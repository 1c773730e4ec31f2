# SPDX-License-Identifier: Apache-2.0
"""FSDP2 (fully_shard) and FSDP1 around the layer, on CPU over Gloo; run by test_distributed.py as
rank_cases.py is.

torch.nn.SyncBatchNorm takes no CPU input. Plain nn.BatchNorm2d fails in FSDP2's mixed precision
("expected scalar type BFloat16 but found Float"), and FSDP1's wrap policies switch mixed precision
off for batch norm. The reference in float64 and its bound are those of rank_cases_parallel.py.
"""

import functools
import warnings

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor

import syncbn
from rank_cases_parallel import (
    STEPS,
    assert_equal_on_ranks,
    layers_of,
    network,
    own,
    samples,
    train,
)

BFLOAT16 = torch.bfloat16


def sharded(model: nn.Module, world: int, each: bool = True, **options) -> nn.Module:
    """each: every layer with parameters on its own, then the rest."""
    mesh = init_device_mesh("cpu", (world,))
    for layer in model if each else ():
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def assert_near_fsdp2(model: nn.Module, plain: nn.Module) -> None:
    for (name, q), p in zip(plain.state_dict().items(), model.state_dict().values(), strict=True):
        p = p.full_tensor() if isinstance(p, DTensor) else p
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-10, msg=name)


def case_fsdp2_equals_one_process(rank, world):
    """Channels that the ranks do not divide, shards of layers and of the whole; inside forward a
    layer has plain tensors, its group is its own, and buffers are not sharded."""
    plain = network()
    train(plain, lambda step: samples(step, world))
    for each in (True, False):
        model = sharded(syncbn.convert_sync_batchnorm(network()), world, each)
        train(model, own(rank, world))
        assert_near_fsdp2(model, plain)
        assert_equal_on_ranks(model, STEPS)
        assert isinstance(model[1].weight, DTensor)
        assert type(model[1].running_mean) is torch.Tensor


def case_fsdp2_model_made_on_meta(rank, world):
    """to_empty leaves garbage in the call counter, too; reset_parameters sets it."""
    with torch.device("meta"):
        model = syncbn.convert_sync_batchnorm(network())
    sharded(model, world).to_empty(device="cpu")
    for module in model:
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for layer in (model[0], model[3]):  # the same on every rank
        nn.init.constant_(layer.weight, 0.1)
        nn.init.zeros_(layer.bias)
    train(model, own(rank, world))
    assert_equal_on_ranks(model, STEPS)
    # Or, for a model whose parameters and statistics come from a checkpoint:
    for layer in layers_of(model):
        layer.state.call.fill_(2**47 - 7 * rank)
    syncbn.reset_groups(model)
    train(model, own(rank, world), steps=1)
    assert_equal_on_ranks(model, 2**47 + 1)


class Seen:
    """Keeps what a layer saw and gave, to do it again outside of FSDP."""

    def __init__(self, layer: syncbn.SyncBatchNorm) -> None:
        # FSDP's own hooks come before these.
        self.layer, self.calls, self.outputs = layer, [], []
        layer.register_forward_pre_hook(self.before)
        layer.register_forward_hook(lambda layer, a, y: self.outputs.append(y.detach().clone()))

    def before(self, layer, arguments) -> None:
        tensors = (arguments[0], layer.weight, layer.bias)
        self.calls.append([t.detach().clone() for t in tensors])

    def check_exact(self, dtype: torch.dtype) -> None:
        """The type of input, weight and bias; the bits of all calls, whose output is bfloat16."""
        x = self.calls[0][0]
        twin = syncbn.SyncBatchNorm(x.shape[1])
        twin.running_mean, twin.running_var = (
            b.to(self.layer.running_mean.dtype) for b in (twin.running_mean, twin.running_var)
        )
        for (x, weight, bias), y in zip(self.calls, self.outputs, strict=True):
            assert x.dtype == weight.dtype == bias.dtype == dtype
            twin.weight, twin.bias = nn.Parameter(weight), nn.Parameter(bias)
            assert torch.equal(twin(x).to(BFLOAT16), y) and y.dtype == BFLOAT16
        assert twin.state.call == self.layer.state.call
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            buffer = twin.get_buffer(name)
            assert torch.equal(buffer, self.layer.get_buffer(name)), name


def case_fsdp2_bfloat16_exact(rank, world):
    """bfloat16 input and parameters, float32 buffers: training and evaluation."""
    policy = MixedPrecisionPolicy(param_dtype=BFLOAT16, reduce_dtype=torch.float32)
    for each in (True, False):
        model = sharded(
            syncbn.convert_sync_batchnorm(network().float()), world, each, mp_policy=policy
        )
        seen = Seen(model[1])
        train(model, lambda step: own(rank, world)(step).float())
        seen.check_exact(BFLOAT16)
        assert model[1].running_mean.dtype == torch.float32 == model[1].weight.dtype
        assert_equal_on_ranks(model, STEPS)
        assert model.eval()(samples(9, 1).float()).dtype == BFLOAT16
        x, weight, bias = seen.calls[-1]
        running = model[1].running_mean, model[1].running_var
        expected = nn.functional.batch_norm(x, *running, weight.float(), bias.float())
        assert torch.equal(seen.outputs[-1], expected)


def fsdp1(model: nn.Module, **options) -> FullyShardedDataParallel:
    # Without device_id it wants an accelerator.
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


POLICIES = (
    None,
    ModuleWrapPolicy({nn.Conv2d}),
    ModuleWrapPolicy({nn.Conv2d, syncbn.SyncBatchNorm}),
    functools.partial(size_based_auto_wrap_policy, min_num_params=20),
)


def case_fsdp1_equals_one_process(rank, world):
    plain = network()
    train(plain, lambda step: samples(step, world))
    for policy in POLICIES:
        model = fsdp1(
            syncbn.convert_sync_batchnorm(network()),
            auto_wrap_policy=policy,
            use_orig_params=policy is None,
        )
        train(model, own(rank, world))
        assert_equal_on_ranks(model, STEPS)
        with FullyShardedDataParallel.summon_full_params(model):
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(p.view_as(q), q, rtol=1e-10, atol=1e-10)
        for layer, i in zip(layers_of(model), (1, 4), strict=True):
            for name in ("running_mean", "running_var", "num_batches_tracked"):
                got, expected = getattr(layer, name), getattr(plain[i], name)
                torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def case_fsdp1_bfloat16_exact(rank, world):
    """Without a wrap policy the layer is in bfloat16, its buffers if asked. A policy wraps it on
    its own, in float32, with a warning and casts around it, as it does all batch norm."""
    for policy, buffers in ((None, None), (None, BFLOAT16), (POLICIES[1], BFLOAT16)):
        mixed = MixedPrecision(BFLOAT16, reduce_dtype=torch.float32, buffer_dtype=buffers)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = fsdp1(
                syncbn.convert_sync_batchnorm(network().float()),
                auto_wrap_policy=policy,
                mixed_precision=mixed,
            )
        seen = Seen(layers_of(model)[0])
        train(model, lambda step: own(rank, world)(step).float())
        kept = BFLOAT16 if policy is None else torch.float32
        seen.check_exact(kept)
        assert seen.layer.running_mean.dtype == (kept if buffers else torch.float32)
        assert_equal_on_ranks(model, STEPS)
        assert model.eval()(samples(9, 1).float()).isfinite().all()
