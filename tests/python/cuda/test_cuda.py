# SPDX-License-Identifier: Apache-2.0
"""The layer on CUDA: bits of the CPU, streams, errors; and what a machine without a GPU gets.

torch.nn.SyncBatchNorm trains on GPUs only, adds in the order of its blocks, and so has neither the
bits of a CPU nor those of another shape of grid.
"""

import copy
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import syncbn
from support import (
    TORCH_DTYPES,
    assert_same_layers,
    layouts_of,
    new_layer,
    rough_samples,
    to_tensor,
)
from syncbn import __main__, _build, operators
from syncbn.ops import batch_norm
from syncbn.step.options import check_in_place

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

WITHOUT_DRIVER = """
import pathlib, torch, syncbn
from syncbn import operators
x = torch.randn(4, 3, 5, requires_grad=True)
syncbn.SyncBatchNorm(3)(x).sum().backward()
assert not operators._cuda_loaded and "libsyncbn_torch_cuda" not in open("/proc/self/maps").read()
library = pathlib.Path(syncbn.__file__).parent / "lib" / "libsyncbn_torch_cuda.so"
assert library.exists() == (syncbn._build.cuda_version is not None)
if library.exists():
    torch.ops.load_library(library)
    assert torch._C._dispatch_has_kernel_for_dispatch_key("syncbn::forward_finish", "CUDA")
print(operators.why_not_cuda())
"""


def test_trains_on_cpu_without_a_driver():
    """And the CUDA library, if there is one, loads there too."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", WITHOUT_DRIVER]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() != "None"


@pytest.mark.parametrize(
    "built, torch_cuda, available, text",
    (
        (None, "13.0", True, "no CUDA library; build it again with CUDA 13: nvcc on PATH"),
        (None, None, False, "no CUDA library; build it again with CUDA 12: nvcc on PATH"),
        (
            "13.0.88",
            "12.8",
            True,
            "built with CUDA 13.0.88, .* for CUDA 12.8; build it again with ",
        ),
        ("13.0.88", "12.8", True, "CUDA 12: nvcc .*; or install a PyTorch for CUDA 13$"),
        ("13.0.88", None, True, "for another kind of GPU; install a PyTorch for CUDA"),
        ("13.0.88", "13.2", False, "PyTorch finds no CUDA device; see torch.cuda.is_available"),
    ),
)
def test_layer_says_why_cuda_cannot_be_used(monkeypatch, built, torch_cuda, available, text):
    """torch.nn.SyncBatchNorm on a PyTorch without CUDA: "SyncBatchNorm expected input tensor to be
    on one of ...", without what to do."""
    with FakeTensorMode():
        layer = syncbn.SyncBatchNorm(3, device="cuda")
        x = torch.empty(4, 3, 5, device="cuda")
        monkeypatch.setattr(operators, "_cuda_loaded", False)
        monkeypatch.setattr(_build, "cuda_version", built)
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
        monkeypatch.setattr(torch.version, "cuda", torch_cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
        with pytest.raises(RuntimeError, match=f"^syncbn cannot work on CUDA: .*{text}"):
            layer(x)


@pytest.fixture
def fake_cuda(monkeypatch):
    """Tensors without memory that say they are on CUDA; outside of a capture if nothing else is
    said, because there is no driver to ask."""
    monkeypatch.setattr(operators, "_cuda_loaded", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with FakeTensorMode():
        yield


def test_inplace_step_in_a_capture_reads_no_weights(fake_cuda, monkeypatch):
    """Outside it looks at the bound of the recovered input, which a fake tensor cannot tell."""
    weight, x = torch.empty(3, device="cuda"), torch.empty(4, 3, 5, device="cuda")
    with pytest.raises(DataDependentOutputException):
        check_in_place(x, weight, None, None, 0.01)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    check_in_place(x, weight, None, None, 0.01)


@pytest.mark.parametrize("mode", ({}, {"use_global_est": True}, {"is_infer": True}))
def test_operator_reads_nothing_of_the_device(fake_cuda, mode):
    """syncbn.ops.batch_norm; a fake tensor has no value that the host could wait for."""
    x = torch.empty(4, 3, 5, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    mean, var, scale, bias = (torch.empty(3, device="cuda") for _ in range(4))
    scale.requires_grad_()
    batches = torch.zeros(1, dtype=torch.int64, device="cuda")
    out = batch_norm(x, mean, var.half(), scale, bias, batches, **mode)
    dtypes = (x.dtype, torch.float64, torch.float64, torch.float32, torch.float16, torch.int64)
    assert tuple(t.dtype for t in out) == dtypes and all(t.is_cuda for t in out)
    assert tuple(t.shape for t in out) == (x.shape, *[(3,)] * 4, (1,))
    assert out.y.requires_grad and not any(t.requires_grad for t in out[1:])


def test_check_names_the_layers_whose_ranks_disagreed():
    """By what such a call leaves on the device, a count of -1."""
    model = torch.nn.Sequential(*(syncbn.SyncBatchNorm(c, eps=0.001) for c in (3, 4, 5)))
    syncbn.check(model)  # before any call
    for layer in model:
        layer(torch.randn(4, layer.num_features))
    syncbn.check(model)
    for layer in (model[0], model[2]):
        layer.state.count.fill_(-1)
    with pytest.raises(syncbn.DivergenceError) as caught:
        syncbn.check(model)
    text = str(caught.value)
    assert "0 (call 0, 3 channels, eps=0.001" in text and "; 2 (call 0, 5 channels" in text
    assert "4 channels" not in text
    syncbn.check(torch.nn.Linear(2, 2))


# With a GPU.

SHAPES = {
    "planes": (6, 5, 7, 9),
    "wide planes": (3, 4, 24, 32),  # more than one segment, 16-byte accesses
    "2-D": (300, 37),
    "many channels": (3, 2100, 4),
    "one value": (2, 3, 1, 1),
    "no samples": (0, 3, 4),
}
OPTIONS = {
    "plain": {},
    "relu": {"activation": "relu"},
    "leaky_relu, residual": {"activation": "leaky_relu", "residual": True},
    "residual": {"residual": True},
    "masked relu, residual": {"activation": "relu", "residual": True, "mask": True},
    "global gradients": {"affine_grad": "global"},
    "cumulative": {"momentum": None},
}


def run(layer, x, dy, residual=None, mask=None):
    """y and gradients of one step, on the layer's device."""
    device = layer.weight.device

    def place(tensor):
        """In the tensor's own strides: .to() keeps those of dense tensors alone."""
        if tensor is None or device.type == "cpu":
            return tensor
        storage = torch.empty(0, dtype=tensor.dtype, device=device)
        storage.set_(tensor.untyped_storage().to(device=device))
        return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    x, residual = (None if t is None else place(t).detach().requires_grad_() for t in (x, residual))
    y = layer(x, residual, mask=place(mask))
    y.backward(place(dy))
    results = {
        "y": y.detach(),
        "dx": x.grad,
        "dresidual": None if residual is None else residual.grad,
    }
    return {name: None if t is None else t.cpu() for name, t in results.items()}


def assert_same_on_cuda(x, dy, residual=None, mask=None, dtype=torch.float32, **options):
    layer = new_layer(x.shape[1], **options)
    on_cuda = copy.deepcopy(layer).cuda()
    expected = run(layer, x.clone(), dy, residual, mask)
    got = run(on_cuda, x, dy, residual, mask)
    for name, value in expected.items():
        if value is not None:
            assert got[name].shape == value.shape and torch.equal(got[name], value), name
    moved = copy.deepcopy(on_cuda).cpu()
    for p, q in zip(moved.parameters(), on_cuda.parameters(), strict=True):
        p.grad = q.grad.cpu()
    assert_same_layers(moved, layer)
    for name in ("count", "call"):  # which a copy of a layer does not have
        a, b = (getattr(m.state, name).cpu() for m in (on_cuda, layer))
        assert torch.equal(a, b), name


def samples(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    return to_tensor(rough_samples(rng, shape, dtype), dtype)


@needs_gpu
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_bits_of_the_cpu_exact(dtype, shape, options):
    size = SHAPES[shape]
    keywords = dict(OPTIONS[options])
    residual = samples(size, dtype, 2) if keywords.pop("residual", False) else None
    mask = None
    if keywords.pop("mask", False):
        mask = torch.rand(size[:1] + size[2:], generator=torch.Generator().manual_seed(3)) < 0.7
        if size[0] > 0:
            mask.view(-1)[:2] = True
    assert_same_on_cuda(samples(size, dtype), samples(size, dtype, 1), residual, mask, **keywords)


@needs_gpu
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_bits_in_any_layout_exact(dtype):
    shape = (4, 8, 6, 10)
    x, dy = layouts_of(samples(shape, dtype)), layouts_of(samples(shape, dtype, 1))
    for layout in x:
        for of_gradient in ("contiguous", layout):
            assert_same_on_cuda(x[layout].detach(), dy[of_gradient], activation="relu")


@needs_gpu
def test_special_values_exact():
    """NaN, infinities and the largest numbers; a channel without any of them stays as it is."""
    x = torch.randn(8, 6, 5)
    x[0, 0, 0], x[1, 1, 1], x[2, 2, 2] = torch.nan, torch.inf, -torch.inf
    x[:, 3], x[:, 4] = torch.finfo(torch.float32).max, 2.0**-149
    layer = new_layer(6)
    expected, got = (
        run(m, x.clone(), torch.ones_like(x)) for m in (layer, copy.deepcopy(layer).cuda())
    )
    for name in ("y", "dx"):
        torch.testing.assert_close(got[name], expected[name], rtol=0, atol=0, equal_nan=True)


@needs_gpu
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_inplace_exact(dtype):
    """Output, recovered input and gradients; the output lies in the input's memory."""
    layer = new_layer(5, activation="leaky_relu", negative_slope=0.25, inplace=True)
    with torch.no_grad():  # away from 0, from where no input is recovered
        layer.weight.fill_(1.5)
        layer.bias.fill_(0.25)
    results = []
    for m in (layer, copy.deepcopy(layer).cuda()):
        leaf = samples((6, 5, 7, 9), dtype).to(m.weight.device).requires_grad_()
        x = leaf * 1
        y = m(x)
        y.backward(samples((6, 5, 7, 9), dtype, 1).to(leaf.device))
        assert y.data_ptr() == x.data_ptr()
        tensors = (y, m.running_var, leaf.grad, m.weight.grad, m.bias.grad)
        results.append([t.detach().cpu() for t in tensors])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@needs_gpu
@pytest.mark.parametrize("mode", ({}, {"use_global_est": True}, {"is_infer": True}))
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_operator_exact(dtype, mode):
    """syncbn.ops.batch_norm: outputs, updated variables and gradients."""
    results = []
    for device in ("cpu", "cuda"):
        x = samples((6, 5, 7, 9), dtype).to(device).requires_grad_()
        mean, var, scale, bias = (torch.linspace(1, i + 2, 5).to(device) for i in range(4))
        scale, batches = scale.requires_grad_(), torch.tensor([3], device=device)
        out = batch_norm(x, mean, var, scale, bias, batches, momentum=0.3, **mode)
        out.y.backward(samples((6, 5, 7, 9), dtype, 1).to(device))
        results.append([t.detach().cpu() for t in (*out, x.grad, scale.grad)])
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@needs_gpu
def test_autocast_and_half_parameters_exact():
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
        assert_same_on_cuda(x, torch.ones_like(x))
        layer = syncbn.SyncBatchNorm(4, dtype=dtype)
        a, b = (run(m, x.clone(), torch.ones_like(x)) for m in (layer, copy.deepcopy(layer).cuda()))
        assert torch.equal(a["y"], b["y"]) and torch.equal(a["dx"], b["dx"])


@needs_gpu
def test_several_streams_at_once_exact():
    """Calls that overlap share no scratch memory."""
    layers = [new_layer(64).cuda() for _ in range(4)]
    x = [torch.randn(32, 64, 40, 40, device="cuda") for _ in layers]
    expected = [copy.deepcopy(layer)(t) for layer, t in zip(layers, x, strict=True)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in layers]
    got = []
    for layer, t, stream in zip(layers, x, streams, strict=True):
        with torch.cuda.stream(stream):
            got.append(layer(t))
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@needs_gpu
def test_welford_mode_repeats_its_bits_near_the_cpu():
    """Of 12,800 values of at most 8; the bound of the mean is that of three roundings a value."""
    x = torch.randn(8, 5, 40, 40).clamp(-8, 8)
    layer = new_layer(5, statistics="welford", momentum=1.0)
    first, again = (copy.deepcopy(layer).cuda() for _ in range(2))
    results = [run(m, x.clone(), torch.ones_like(x)) for m in (layer, first, again)]
    assert torch.equal(results[1]["y"], results[2]["y"])
    assert torch.equal(first.running_var, again.running_var)
    error = (first.running_mean.cpu() - layer.running_mean).abs().max()
    assert error <= 2 * 3 * 12_800 * 2**-24 * 8


@needs_gpu
def test_tensors_on_several_devices_are_an_error():
    layer = syncbn.SyncBatchNorm(3)
    with pytest.raises(ValueError, match="expected cuda:0, the input's device"):
        layer(torch.randn(4, 3, device="cuda"))
    with pytest.raises(ValueError, match="residual: got .* on cpu"):
        layer.cuda()(torch.randn(4, 3, device="cuda"), torch.randn(4, 3))
    assert layer.num_batches_tracked == 0


@needs_gpu
def test_list_form_on_one_gpu_exact():
    layer = new_layer(5)
    on_cuda = copy.deepcopy(layer).cuda()
    xs = [torch.randn(n, 5, 6, generator=torch.Generator().manual_seed(n)) for n in (1, 4, 0)]
    expected, got = layer(xs), on_cuda([x.cuda() for x in xs])
    assert all(torch.equal(a, b.cpu()) for a, b in zip(expected, got, strict=True))
    assert torch.equal(on_cuda.running_var.cpu(), layer.running_var)


@needs_gpu
def test_doctor_and_report_name_cuda():
    layer = new_layer(3).cuda()
    layer(torch.randn(4, 3, device="cuda"))
    (row,) = syncbn.report(layer)
    assert row.kernels == "cuda" and row.count == 4
    assert __main__.facts()["CUDA library"].startswith("active: ")
