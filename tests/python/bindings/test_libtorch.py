# SPDX-License-Identifier: Apache-2.0
"""syncbn/torch.hpp, the layer for LibTorch: the same bits as the Python package, on any number of
ranks, and what ranks get when something is wrong. Programs in C++, built against the installed
package and the torch that is installed beside it.

torch::nn has no synchronized batch norm.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import syncbn
from rank import Rank
from support import PROJECT, bits, layouts_of, rough_samples, to_tensor
from syncbn.operators import OWN

SAMPLES = 7
PLANES = {2: (), 3: (17,), 4: (5, 7), 5: (3, 4, 3)}  # by the number of axes
DTYPES = ("float16", "bfloat16", "float32", "float64")
LAYOUTS = ("contiguous", "channels-last", "gaps", "slice", "channels-last slice")
STEPS = 2
AFTERWARDS = "; call reset on every rank, or make a new group if a rank has ended"
PER_SAMPLE = ("x", "dy", "evaluate")
#: Samples of each rank; 0 ranks: no process group.
SPLITS = {0: (7,), 1: (7,), 2: (3, 4), 3: (5, 0, 2)}


def run(*command, timeout=60):
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    ended = subprocess.run(
        [str(part) for part in command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert ended.returncode == 0, f"exit code {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


@pytest.fixture(scope="session")
def build(tmp_path_factory) -> Path:
    """As a user builds: with the path that the package tells; its interpreter finds torch. One of
    the programs begins with the page's snippets, which so compile with their own includes."""
    folder = tmp_path_factory.mktemp("libtorch")
    page = (PROJECT / "docs/libtorch.md").read_text(encoding="utf-8")
    snippets = folder / "snippets.hpp"
    snippets.write_text("".join(re.findall(r"```c\+\+\n(.*?)```", page, re.DOTALL)), "utf-8")
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    cmake = shutil.which("cmake", path=tools)
    package = run(sys.executable, "-m", "syncbn", "--cmake-dir").strip()
    options = [f"-Dsyncbn_DIR={package}", f"-DPython3_EXECUTABLE={sys.executable}"]
    options += [f"-DSNIPPETS={snippets}", "-DCMAKE_BUILD_TYPE=Release"]
    run(cmake, "-S", PROJECT / "tests/libtorch", "-B", folder, *options)
    run(cmake, "--build", folder, "-j2", timeout=600)
    return folder


def case(dtype="float32", axes=4, layout="contiguous", channels=5, **options) -> dict:
    """Inputs and output gradients of two steps, and the layer's options and parameters."""
    rng = np.random.default_rng([DTYPES.index(dtype), axes, LAYOUTS.index(layout), channels])
    shape = (SAMPLES, channels, *options.pop("plane", PLANES[axes]))

    def samples() -> torch.Tensor:
        return layouts_of(to_tensor(rough_samples(rng, shape, dtype), dtype))[layout]

    def parameter(low: float, high: float) -> torch.Tensor:
        return torch.from_numpy(rng.uniform(low, high, channels)).float()

    given = {"channels": channels, "track": True, "momentum": 0.1, "double": False, "affine": True}
    given |= options
    parameters = {"weight": parameter(0.5, 2), "bias": parameter(-1, 1)}
    made = given | {
        "parameters": parameters if given.pop("affine") else {},
        "x": [samples() for _ in range(STEPS)],
        "dy": [samples() for _ in range(STEPS)],
    }
    # PyTorch's operator takes no float64 beside parameters of float32.
    wanted = torch.float64 if given["double"] else torch.float32
    x = made["x"][0]
    return made | {"evaluate": [x if dtype.endswith("16") else x.to(wanted)]}


def cases() -> dict[str, dict]:
    made = {
        f"{dtype}, {axes} axes, {layout}": case(dtype, axes, layout)
        for dtype in DTYPES
        for axes in PLANES
        for layout in LAYOUTS
    }
    # Running statistics in float64, the first of which are the batch's: mean and variance.
    made["statistics"] = case(momentum=None, double=True)
    made["float16, mixed"] = case("float16", momentum=None)
    made["plain"] = case(affine=False, track=False)
    made["threads"] = case(channels=16, plane=(48, 48))  # enough for two
    made["wide"] = case(axes=2, channels=600)  # beyond the first message
    made["wide float64"] = case("float64", axes=2, channels=130)
    return made


def expected(given: dict, split: tuple[int, ...]) -> dict[str, list[torch.Tensor]]:
    """By name what each rank has, from the Python package on one rank with all samples."""
    layer = syncbn.SyncBatchNorm(
        given["channels"],
        momentum=given["momentum"],
        affine=bool(given["parameters"]),
        track_running_stats=given["track"],
    )
    layer.load_state_dict(given["parameters"], strict=False)
    layer = layer.double() if given["double"] else layer
    results = {}
    for step, (x, dy) in enumerate(zip(given["x"], given["dy"])):
        x = x.detach().requires_grad_()
        y = layer(x)
        y.backward(dy)
        results[f"{step}/y"] = y.detach().split(split)
        results[f"{step}/dx"] = x.grad.split(split)
        for name, buffer in layer.named_buffers():
            if not name.startswith("_"):
                results[f"{step}/{name}"] = [buffer.clone()] * len(split)
        if given["parameters"]:
            shares = own_shares(x.detach(), dy, split, layer)
            results[f"{step}/dweight"], results[f"{step}/dbias"] = shares
            if len(split) == 1:  # a rank's share is all then: what the operators say is the layer's
                assert torch.equal(shares[0][0], layer.weight.grad)
                assert torch.equal(shares[1][0], layer.bias.grad)
        layer.zero_grad()
    layer.eval()
    # On each rank's own samples: without running statistics the local batch normalizes.
    results["eval"] = [layer(part).detach() for part in given["evaluate"][0].split(split)]
    return results


def own_shares(x, dy, split, layer) -> tuple:
    """Each rank's part of the gradients of weight and bias."""
    whole = Rank(x, eps=layer.eps)
    whole.step()
    pairs = []
    for x_part, dy_part in zip(x.split(split), dy.split(split)):
        rank = Rank(x_part)
        rank.saved, rank.bits = whole.saved, whole.bits
        rank.begin_backward(dy_part, dtypes=(layer.weight.dtype,) * 2, share=True, way=OWN)
        pairs.append(rank.finish_backward(None)[1:])
    return tuple(zip(*pairs))


@pytest.mark.parametrize("ranks", SPLITS)
def test_same_bits_as_the_python_package_on_one_rank_exact(build, tmp_path, ranks):
    split = SPLITS[ranks]
    given = cases()
    for rank in range(len(split)):
        parts = {
            name: one | {key: [t.split(split)[rank] for t in one[key]] for key in PER_SAMPLE}
            for name, one in given.items()
        }
        torch.save(parts, tmp_path / f"in{rank}.pt")
    run(build / "layer", "steps", tmp_path, ranks)
    results = [
        torch.load(tmp_path / f"out{rank}.pt", weights_only=False) for rank in range(len(split))
    ]
    for name, one in given.items():
        wanted = expected(one, split)
        assert {key for key in results[0] if key.startswith(f"{name}/")} == {
            f"{name}/{key}" for key in wanted
        }
        for key, of_ranks in wanted.items():
            for rank, tensor in enumerate(of_ranks):
                got = results[rank][f"{name}/{key}"]
                if key.endswith("num_batches_tracked"):
                    assert got == tensor, (name, key, rank)
                else:
                    assert got.dtype == tensor.dtype and got.shape == tensor.shape, (name, key)
                    assert torch.equal(bits(got), bits(tensor)), (name, key, rank)


def test_state_dicts_load_both_ways(build, tmp_path):
    plain = torch.nn.BatchNorm1d(3)
    plain(torch.arange(12.0).view(4, 3))
    torch.nn.init.uniform_(plain.weight)
    torch.jit.script(plain).save(tmp_path / "python.pt")
    torch.save({f"0.{name}": t for name, t in plain.state_dict().items()}, tmp_path / "state.pt")
    run(build / "layer", "state", tmp_path)
    for file, prefix in (("cpp.pt", ""), ("network.pt", "0.")):
        back = torch.jit.load(tmp_path / file).state_dict()
        assert list(back) == [prefix + name for name in plain.state_dict()]
        for name, tensor in plain.state_dict().items():
            assert torch.equal(back[prefix + name], tensor), name
    torch.nn.Sequential(syncbn.SyncBatchNorm(3)).load_state_dict(back)


@pytest.fixture(scope="session")
def errors(build, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("errors")
    run(build / "layer", "errors", folder)
    return folder


def lines(errors: Path, scenario: str, rank: int) -> list[str]:
    return (errors / f"{scenario}.{rank}").read_text(encoding="utf-8").splitlines()


def at(direction="forward", call=0, channels=3, dtype="float32", layer="bn") -> str:
    return f"{layer}, call {call}, {direction}, {channels} channels, {dtype}"


def test_refused_input_is_an_error_on_every_rank_and_the_group_serves_on(errors):
    cpu = "expected the CPU; syncbn.SyncBatchNorm of the Python package takes CUDA tensors"
    refused = [
        at(call=0, dtype="int64")
        + ": input: got dtype int64, expected float16, bfloat16, float32 or float64",
        f"{at(call=1)}: input: got a tensor on meta, {cpu}",
        "bn, call 2, forward: input: got an undefined tensor, expected a defined one",
        "bn, call 3, forward: input: got a tensor without strides, expected one with strides",
        f"{at(call=4, channels=2)}: x: got 2 channels, expected those of the layer, 3",
        "bn, call 5, forward: x: got 1 axes, shape (12), expected 2 to 12 axes (N, C, spatial...)",
        f"{at(call=6)}: momentum: got 2, expected a number in [0, 1]",
    ]
    assert lines(errors, "refused", 1) == [*(f"InvalidArgument: {t}" for t in refused), "ok", "1"]
    told = [
        f"PeerLost: {at(call=i)}: rank 0 of 2: rank 1 refused its call: {text}"
        for i, text in enumerate(refused)
    ]
    assert lines(errors, "refused", 0) == [*told, "ok", "1"]


def test_calls_that_differ_are_named_on_every_rank(errors):
    wide = (at(call=1), at(layer="wide", channels=600))
    calls = [
        (at(), at(layer="stem.bn"), ": layer: bn on rank 0, stem.bn on rank 1"),
        # messages of different lengths
        (
            *wide,
            ": layer: bn on rank 0, wide on rank 1; call: 1 on rank 0, 0 on rank 1; "
            "channels: 3 on rank 0, 600 on rank 1",
        ),
        (at(), at(dtype="bfloat16"), ": dtype: float32 on rank 0, bfloat16 on rank 1"),
        (
            at("backward", call=1),
            at(call=2),
            ": call: 1 on rank 0, 2 on rank 1; direction: backward on rank 0, forward on rank 1",
        ),
    ]
    for rank in (0, 1):
        told = [
            f"DivergenceError: {pair[rank]}: rank {rank} of 2: the ranks did not make the same "
            f"call{pair[2]}"
            for pair in calls
        ]
        assert lines(errors, "differ", rank) == [*told, "ok"]


def test_a_layer_without_a_name_is_refused_among_several_ranks(errors):
    """Its statistics could be mixed silently with those of another layer of its shape."""
    text = (
        "layer_name: got none, expected this layer's own name, the same on all ranks; "
        "syncbn::torch::name_layers(model) gives each layer its path"
    )
    told = f"{at()}: rank 0 of 2: rank 1 refused its call: {text}"
    refused = f"InvalidArgument: {text}"
    for rank, first in enumerate((f"PeerLost: {told}", refused)):
        assert lines(errors, "unnamed", rank) == [first, refused, "0", "ok", "ok"]


def test_one_value_over_all_ranks_is_refused_and_none_is_not(errors):
    text = "x: got 1 value per channel over all ranks, expected more than 1 when training"
    for rank in (0, 1):
        told = lines(errors, "one_value", rank)
        assert told == [f"InvalidArgument: {at()}: {text}", "0", "unchanged", "0"]


def test_a_rank_that_does_not_come_is_named(errors):
    late = "rank 2 did not come to the exchange within 2000 ms"
    for rank in (0, 1):
        who, other = f"rank {rank} of 3", f"rank {1 - rank}: {at()}"
        assert lines(errors, "missing", rank) == [
            f"ExchangeTimeout: {at()}: {who}: {late}; {other}",
            f"PeerLost: {at(call=1)}: {who}: the group is broken: {late}; {other}{AFTERWARDS}",
        ]
    (told,) = lines(errors, "missing", 2)
    assert told.startswith(
        f"PeerLost: {at()}: rank 2 of 3: a rank has ended, or closed its connections; "
        f"rank 0: {at()}; rank 1: {at()}; the process group: "
    )


def test_a_rank_that_ended_is_named(errors):
    (told,) = lines(errors, "gone", 0)
    assert told.startswith(
        f"PeerLost: {at(call=1)}: rank 0 of 2: rank 1 has ended, or closed its connections; "
        "the process group: "
    )


def test_without_a_gradient_of_the_input_backward_waits_for_nobody(errors):
    for rank in (0, 1):
        assert lines(errors, "frozen_input", rank) == ["ok"]


def test_one_message_per_direction_and_two_beyond_512_channels(errors):
    for rank in (0, 1):
        assert lines(errors, "messages", rank) == ["1", "1", "0", "2", "2", "0"]


def test_layer_without_a_group(errors):
    assert lines(errors, "alone", 0) == [
        f"InvalidArgument: {at()}: x: got 1 value per channel over all ranks, expected more than "
        "1 when training",
        "c10::Error: bn: got a second derivative, expected first ones alone, or "
        "syncbn.SyncBatchNorm of the Python package",
        "same gradient",  # with and without a gradient of the input
        "same output",  # of a lazily negated input
        "InvalidArgument: input: got 1 axes, expected at least 2 (N, C, spatial...)",
        "stem",
        "head",
    ]


def test_batch_norms_in_containers_are_replaced_exact(errors):
    made = "syncbn::torch::SyncBatchNorm(3, eps={}, momentum={}, affine={}, track_running_stats={})"
    layers = {
        "net.body.inner.0": made.format("1e-05", "0.1", "false", "true"),
        "net.list.0": made.format("1e-05", "0.1", "true", "false"),
        "net.list.1": made.format("0.5", "None", "true", "true"),
        "net.dict.norm": made.format("1e-05", "0.1", "true", "true") + ", evaluates",
    }
    # One layer in two places has one name.
    told = ["net.body.first net.list.1 " + layers["net.list.1"]]
    told += [f"{name} {name} {text}" for name, text in layers.items()]
    refused = "InvalidArgument: model: got batch norms outside of containers: {}, expected "
    refused += "each in a Sequential, ModuleList or ModuleDict, or declared as "
    refused += "syncbn::torch::SyncBatchNorm"
    for rank in (0, 1):
        assert lines(errors, "converted", rank) == [
            "4",
            *told,
            "same statistics",
            "same output",
            "2 batches",
            "trained",
            refused.format("norm"),
            "unchanged",
            refused.format("the whole model"),
        ]


def test_gradients_are_averaged_exact(errors):
    """A gradient that only rank 1 has is a half of it; one that nobody has stays absent."""
    for rank in (0, 1):
        assert lines(errors, "averaged", rank) == [
            "float 2 2",
            "double 2 2",
            "float 3 3",
            "none",
            "none",
            "InvalidArgument: process_group: got none, expected a group",
        ]


def test_ranks_whose_parameters_differ_get_an_error_in_place_of_mixed_gradients(errors):
    differ = "the ranks did not pass the same parameters: "
    order = "parameter 0 in order: float32 (3) on rank 0, float32 (3, 2) on rank 1"
    number = "parameters that require a gradient: 3 on rank 0, 2 on rank 1; "
    number += "parameter 2 in order: float64 (2) on rank 0, none on rank 1"
    for rank in (0, 1):
        told = lines(errors, "averaged_other", rank)
        who = f"parameters: rank {rank} of 2: "
        assert told[:2] == [
            f"DivergenceError: average_gradients, 3 {who}{differ}{order}",
            f"DivergenceError: average_gradients, {3 - rank} {who}{differ}{number}",
        ]
        call = (at(), "average_gradients, 3 parameters")[rank == 0]
        assert told[2].startswith(f"DivergenceError: {call}: rank {rank} of 2 brought ")
        assert told[3:5] == ["ok", "unchanged"]
    assert lines(errors, "averaged_other", 0)[5:] == [
        "ExchangeTimeout: average_gradients, 3 parameters: rank 0 of 2: rank 1 did not come to the "
        "exchange within 2000 ms"
    ]


def test_layer_over_any_communicator_exact(errors):
    text = "communicator: got one beside a process_group, expected one of the two"
    assert lines(errors, "threads", 0) == [
        "same output",
        "same gradient",
        f"InvalidArgument: {text}",
        f"PeerLost: rank 1 of 2: rank 0 refused its call: {text}",
    ]


def test_communicator_over_a_process_group(errors):
    left = "rank 0 left the group: it has no more pictures"
    for rank in (0, 1):
        differ = f"rank {rank} of 2 brought {176 + 8 * rank} bytes to the exchange, "
        differ += f"rank {1 - rank} brought {184 - 8 * rank}"
        assert lines(errors, "communicator", rank) == [
            "sums",
            f"DivergenceError: {differ}",
            ("ok", f"PeerLost: rank 1 of 2: {left}")[rank],
            f"PeerLost: rank {rank} of 2: the group is broken: {left}{AFTERWARDS}",
            "InvalidArgument: process_group: got none, expected a group",
            "InvalidArgument: timeout: got 0 ms, expected at least 1 ms",
            "InvalidArgument: process_group: got one without a backend for CPU tensors, expected "
            "one with it, for example Gloo",
            "InvalidArgument: process_group: got rank 2, expected 0 to 1",
            "InvalidArgument: process_group: got rank -1, expected 0 to 1",
            "InvalidArgument: process_group: got 0 ranks, expected 1 to 2048",
            "InvalidArgument: process_group: got 2049 ranks, expected 1 to 2048",
        ]


def test_example_trains_two_processes(build):
    told = sorted(run(build / "example/train", 100).splitlines())
    assert len(told) == 2
    for rank, line in enumerate(told):
        assert line.startswith(f"rank {rank} of 2: loss ")
        assert line.endswith("running statistics equal on all ranks")
