# SPDX-License-Identifier: Apache-2.0
"""syncbn.check(model, across_ranks=True): what leaves ranks apart, and no exchange notices. Run by
test_distributed.py as rank_cases.py is."""

from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import syncbn
from rank_cases import diverges, raises
from syncbn.exchange import groups


def network(**options):
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Tanh(), nn.BatchNorm1d(4))
    model = syncbn.convert_sync_batchnorm(model, **options)
    model(torch.randn(3, 4)).square().sum().backward()
    return model


def check(model):
    syncbn.check(model, across_ranks=True)


def alone(rank, change, *texts, model=None):
    """All ranks get the error if the last rank alone has changed its model, and none before."""
    model = network() if model is None else model
    check(model)
    last = dist.get_world_size() - 1
    if rank == last:
        change(model)
    for text in texts:
        diverges(
            f"^syncbn.check, rank {rank} of {last + 1}: layers differ between ranks: {text}",
            check,
            model,
        )
    check(network())  # the ranks go on together


def ranks(world):
    return "rank 0" if world == 2 else f"ranks {', '.join(map(str, range(world - 1)))}"


def case_check_finds_momentum(rank, world):
    def change(model):
        model[2].momentum = None

    alone(rank, change, f"2: momentum: 0.1 on {ranks(world)}, None on rank {world - 1}$")


def case_check_finds_affine_grad(rank, world):
    def change(model):
        model[0].affine_grad = "global"

    alone(rank, change, f"0: affine_grad: share on {ranks(world)}, global on rank {world - 1}$")


def case_check_finds_statistics_that_were_reset(rank, world):
    alone(
        rank,
        lambda model: model[0].reset_running_stats(),
        f"0: running_mean: norm .* on {ranks(world)}, norm 0 .* on rank {world - 1}; "
        f"0: running_var: .*; 0: num_batches_tracked: 1 on {ranks(world)}, 0 on rank {world - 1}$",
    )


def case_check_finds_one_bit_of_one_channel(rank, world):
    def change(model):
        model[0].running_var[3].mul_(1 + 2**-23)

    alone(rank, change, f"0: running_var: norm .* on rank {world - 1}$")


def case_check_finds_counters_modes_dtypes_and_parts(rank, world):
    alone(rank, lambda m: m[0].num_batches_tracked.add_(1), "0: num_batches_tracked: 1 on .*, 2 on")
    alone(rank, lambda m: m[0].state.call.add_(1), "0: calls: 1 on .*, 2 on")
    alone(rank, lambda m: m[0].eval(), "0: training: True on .*, False on")
    alone(
        rank, lambda m: m[0].double(), r".*0: running_var's shape: \(4,\) of float32 on .*float64"
    )
    alone(rank, lambda m: setattr(m[0], "bias", None), "0: bias: given on .*, none on")
    alone(rank, lambda m: setattr(m[0], "running_mean", None), "0: running_mean: .*, none on")
    alone(rank, lambda m: setattr(m[0], "sync", False), "0: sync: True on .*, False on")


def case_check_finds_missing_layers(rank, world):
    last = f"rank {world - 1}"
    alone(rank, lambda m: m.pop(2), f"2: missing on {last}$")
    alone(
        rank,
        lambda m: m.append(m.pop(2)) and m.insert(2, nn.Tanh()),
        f"2: missing on {last}; 3: missing on {ranks(world)}$",
    )


def case_check_finds_an_error_of_one_rank(rank, world):
    if rank == world - 1:
        raises(ValueError, "^module: got int, ", check, 5)
    else:
        diverges(f"rank {world - 1}: ValueError: module: got int, ", check, network_without_steps())
    check(network())


def network_without_steps():
    return syncbn.SyncBatchNorm(4)


def case_check_of_ranks_that_agree(rank, world):
    model = network()
    check(model)
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.running_mean.fill_(float("nan"))
    if rank == 0:
        model[0].running_mean.view(torch.int32).add_(1)  # another NaN
    check(model)
    model[0].sync = False
    model[0].running_mean.fill_(rank)  # its own
    check(model)
    check(nn.Linear(2, 2))
    wrapped = nn.ModuleDict({"module": model}) if rank == 0 else model
    check(wrapped)


def case_check_of_groups(rank, world):
    """Each compares its own; all get the error."""
    model = network(group_size=1)
    model[0].running_mean.fill_(rank)
    check(model)
    both = dist.new_group([0, 1])
    if world > 2:
        model = network(process_group=both) if rank < 2 else network(sync=False)
        check(nn.ModuleList([model]))


def case_check_reads_a_malformed_text(rank, world):
    for text in ("{", "[1]", '{"0": 1}', '{"0": {"ranks": 1}}', '{"0": {"ranks": "7"}}', "{}{"):
        with mock.patch.object(groups, "gather_text", lambda own, who, t=text: [t + own[:0], "{}"]):
            raises(syncbn.PeerLost, "^syncbn.check, rank . of 2: ", check, network())


def case_texts_of_two_functions_do_not_meet(rank, world):
    diverges(
        "ranks ask for different exchanges: .*syncbn.check.*syncbn.report|.*syncbn.report.*check",
        (lambda: check(nn.Sequential()))
        if rank
        else (lambda: syncbn.report(nn.Sequential(), True)),
    )
    check(nn.Sequential())
