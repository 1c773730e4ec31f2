"""Several devices of one process: the layer's list form and SelfDataParallel."""

import copy
import itertools
import threading

import numpy as np
import pytest
import torch
from torch import nn

import syncbn
from support import TORCH_DTYPES, rough_samples, to_tensor
from syncbn.parallel import SelfDataParallel, all_reduce

U = 2.0**-53  # the rounding unit of float64


def new_layer(channels, dtype=torch.float32, **options):
    layer = syncbn.SyncBatchNorm(channels, dtype=dtype, **options)
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(-2, 2, channels))
        layer.bias.copy_(torch.linspace(1, 3, channels))
    return layer


def step(layer, xs, dys):
    """Outputs and input gradients of one step with a list, or one tensor."""
    xs = [x.detach().clone().requires_grad_() for x in xs]
    ys = layer(xs) if len(xs) > 1 else [layer(xs[0])]
    torch.autograd.backward(ys, dys)
    return ys, [x.grad for x in xs]


def shares(x, sizes):
    return list(x.split(sizes))


def assert_same_layers(a, b):
    for (name, p), q in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(p, q), name
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), f"gradient of {name}"


SPLITS = ([5, 6], [11, 0], [0, 3, 8], [2, 0, 4, 0, 5], [1, 1, 1, 1, 1, 1, 2, 3])


@pytest.mark.parametrize("affine_grad", ("share", "global"))
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_any_number_of_devices_gives_the_bits_of_one_exact(dtype, affine_grad):
    """On data on which sums in float64 depend on their order. The process's gradients of weight and
    bias are sums over all its devices, so they do not depend on the number of devices either."""
    rng = np.random.default_rng(1)
    x, dy = (to_tensor(rough_samples(rng, (11, 5, 4, 9), dtype), dtype) for _ in range(2))
    whole = new_layer(5, affine_grad=affine_grad)
    (y,), (dx,) = step(whole, [x], [dy])
    for sizes in SPLITS:
        layer = new_layer(5, affine_grad=affine_grad)
        ys, dxs = step(layer, shares(x, sizes), shares(dy, sizes))
        assert torch.equal(torch.cat(ys), y), sizes
        assert torch.equal(torch.cat(dxs), dx), sizes
        assert_same_layers(layer, whole)
    assert whole.num_batches_tracked == 1


@pytest.mark.parametrize("replicate", (False, True))
def test_order_of_the_samples_changes_no_bit_exact(replicate):
    rng = np.random.default_rng(2)
    x = to_tensor(rough_samples(rng, (12, 3, 7), "float32"), "float32")
    layers = [new_layer(3), new_layer(3)]
    order = torch.from_numpy(rng.permutation(12))
    y = torch.cat(SelfDataParallel(layers[0], ["cpu"] * 4, replicate)(x))
    z = torch.cat(SelfDataParallel(layers[1], ["cpu"] * 5, replicate)(x[order]))
    assert torch.equal(y[order], z)
    assert torch.equal(layers[0].running_var, layers[1].running_var)


@pytest.mark.parametrize("shape", ((13, 4), (13, 4, 6), (13, 4, 3, 5)), ids=str)
@pytest.mark.parametrize("reduce", (sum, None), ids=("sum", "all_reduce"))
def test_against_the_formulas_in_float64(shape, reduce):
    """Autograd through mean = sum(x) / N, var = sum(x^2) / N - mean^2, with sums over devices.

    A sum of n terms in the reference has a relative error of n u of its terms' magnitudes, so its
    var is off by (n + 4) u (E[x^2] + mean^2), relative to var + eps by (n + 4) u kappa. y holds
    (var + eps)^(-1/2) and dx the power -3/2 of it, and both a few more roundings and sums of n
    terms, each relative to the magnitudes that are added: below, 4 (n + 4) u kappa of those.
    syncbn's own error, a few u, is within that.
    """
    torch.manual_seed(3)
    eps, sizes = 1e-3, [4, 0, 7, 2]
    x, dy = (torch.randn(shape, dtype=torch.float64) * 2 + shift for shift in (1, 0))
    layer = new_layer(4, torch.float64, eps=eps, momentum=1.0)
    weight, bias = (p.detach().clone().requires_grad_() for p in (layer.weight, layer.bias))
    ys, dxs = step(layer, shares(x, sizes), shares(dy, sizes))

    dims = [d for d in range(x.dim()) if d != 1]
    view = (1, 4) + (1,) * (x.dim() - 2)
    n = x.numel() // 4
    xs = [t.clone().requires_grad_() for t in shares(x, sizes)]
    sums, squares = [t.sum(dims) for t in xs], [t.square().sum(dims) for t in xs]
    if reduce is sum:
        sums, squares = [sum(sums)] * 4, [sum(squares)] * 4
    else:
        sums, squares = all_reduce(sums), all_reduce(squares)
    expected = []
    for t, s, q in zip(xs, sums, squares):
        mean = s / n
        rstd = (q / n - mean.square() + eps).rsqrt()
        t = (t - mean.view(view)) * (weight * rstd).view(view) + bias.view(view)
        expected.append(t)
    torch.autograd.backward(expected, shares(dy, sizes))

    with torch.no_grad():
        mean, var = x.mean(dims), x.var(dims, unbiased=False)
        kappa = ((x.square().mean(dims) + mean.square()) / (var + eps)).view(view)
        few = 4 * (n + 4) * U * kappa
        rstd = (var + eps).rsqrt().view(view)
        a = (weight.abs().view(view)) * rstd
        centered = x.abs() + mean.abs().view(view)
        size = a * centered + bias.abs().view(view)
        assert ((torch.cat(ys) - torch.cat(expected)).abs() <= few * size).all()
        # The three terms of dx, with sums of magnitudes.
        magnitudes = dy.abs().sum(dims).view(view)
        products = (dy.abs() * centered).sum(dims).view(view)
        size = a * (dy.abs() + magnitudes / n + centered * rstd**2 * products / n)
        dx = torch.cat([t.grad for t in xs])
        assert ((torch.cat(dxs) - dx).abs() <= few * size).all()
        few = few.view(4)
        error = (layer.weight.grad - weight.grad).abs()
        assert (error <= few * (rstd * products).view(4)).all()
        assert ((layer.bias.grad - bias.grad).abs() <= few * magnitudes.view(4)).all()
        moment = (x.square().mean(dims) + mean.square()) * n / (n - 1)
        assert ((layer.running_mean - mean).abs() <= (n + 4) * U * x.abs().mean(dims)).all()
        assert ((layer.running_var - var * n / (n - 1)).abs() <= (n + 4) * U * moment).all()


def nodes_of(tensor):
    """All nodes of the graph behind a tensor."""
    seen, waiting = set(), [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return seen


def within(seconds, function):
    """Fails where a deadlock would hang."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"not finished after {seconds} s"


class Residual(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        x = torch.relu(self.bn1(self.stem(x)))
        x = torch.relu(x + self.bn2(self.conv(x)))
        return self.head(x.mean((2, 3)))


def residual(dtype=torch.float64):
    torch.manual_seed(4)
    return syncbn.convert_sync_batchnorm(Residual().to(dtype))


def test_one_node_per_layer_and_one_backward_ends():
    model = SelfDataParallel(residual(), ["cpu"] * 8)
    loss = sum(y.sum() for y in model(torch.randn(9, 3, 5, 5, dtype=torch.float64)))
    exchanges = [node for node in nodes_of(loss) if "BatchNorm" in node.name()]
    assert len(exchanges) == 2
    # All devices lead into the node: 8 inputs, weight and bias.
    for node in exchanges:
        assert sum(following is not None for following, _ in node.next_functions) == 10
    within(60, loss.backward)
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("replicate", (False, True))
@pytest.mark.parametrize("sizes", ([3, 3], [1, 0, 5], [1, 1, 1, 1, 1, 1]), ids=str)
def test_whole_model_agrees_with_one_device(sizes, replicate):
    """Three steps in float64. Both compute the same sums in other orders, at most 10^3 terms each:
    1e-10 leaves room for 10^6 roundings of 2^-53, relative to values of about 1."""
    one, many = residual(), residual()
    parallel = SelfDataParallel(many, ["cpu"] * len(sizes), replicate)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (one, many)]
    for seed in range(3):
        x = torch.randn(6, 3, 5, 5, generator=torch.Generator().manual_seed(seed)).double()
        losses = one(x).square().mean(), torch.cat(parallel(shares(x, sizes))).square().mean()
        for optimizer, loss in zip(optimizers, losses):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert one.bn1.num_batches_tracked == many.bn1.num_batches_tracked == 3
    for (name, p), q in zip(one.state_dict().items(), many.state_dict().values(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("replicate", (False, True))
def test_repeated_steps_give_the_same_gradients_exact(replicate):
    x = torch.randn(7, 3, 6, 6)
    results = []
    for _ in range(4):
        model = SelfDataParallel(residual(torch.float32), ["cpu"] * 5, replicate)
        sum(y.square().sum() for y in model(x)).backward()
        results.append([p.grad for p in model.parameters()])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_replicated_gradients_are_summed_in_device_order_exact():
    """1, 2^24 and -2^24: only from left to right is the sum in float32 0 and not 1."""
    model = nn.Linear(1, 1, bias=False)
    parallel = SelfDataParallel(model, ["cpu"] * 3, replicate=True)
    sum(y.sum() for y in parallel(torch.tensor([[1.0], [2.0**24], [-(2.0**24)]]))).backward()
    assert model.weight.grad.item() == 0


def test_devices_run_in_turns_in_their_order():
    order, model = [], residual()
    for name in ("stem", "conv", "head"):
        module = getattr(model, name)
        module.register_forward_hook(lambda m, i, o, name=name: order.append((name, len(o))))
    threads = threading.active_count()
    SelfDataParallel(model, ["cpu"] * 3)([torch.randn(k, 3, 4, 4).double() for k in (1, 2, 3)])
    assert order == list(itertools.product(("stem", "conv", "head"), (1, 2, 3)))
    assert threading.active_count() == threads


def test_missing_output_gradients_are_zeros_exact():
    torch.manual_seed(5)
    x, dy = torch.randn(6, 3, 4), torch.randn(6, 3, 4)
    a, b = new_layer(3), new_layer(3)
    xs = [t.clone().requires_grad_() for t in shares(x, [1, 2, 3])]
    ys = a(xs)
    ys[1].backward(dy[1:3])
    zeros = torch.zeros_like(dy)
    zeros[1:3] = dy[1:3]
    _, dxs = step(b, shares(x, [1, 2, 3]), shares(zeros, [1, 2, 3]))
    assert all(torch.equal(x.grad, dx) for x, dx in zip(xs, dxs, strict=True))
    assert_same_layers(a, b)


def test_inputs_that_need_no_gradient():
    xs = [torch.randn(2, 3), torch.randn(2, 3, requires_grad=True)]
    layer = new_layer(3)
    layer.weight.requires_grad_(False)
    torch.stack(layer(xs)).square().sum().backward()
    assert xs[0].grad is None and xs[1].grad is not None
    assert layer.weight.grad is None and layer.bias.grad is not None


def test_layouts_and_outputs_without_a_gradient_layout_exact():
    """Channels-last inputs, gradients of another layout."""
    torch.manual_seed(6)
    x, dy = torch.randn(6, 3, 4, 5), torch.randn(6, 3, 4, 5)
    a, b = new_layer(3), new_layer(3)
    ys, dxs = step(a, shares(x, [2, 4]), shares(dy, [2, 4]))
    last = [t.contiguous(memory_format=torch.channels_last) for t in shares(x, [2, 4])]
    zs, dzs = step(b, last, shares(dy, [2, 4]))
    assert all(torch.equal(p, q) for p, q in zip([*ys, *dxs], [*zs, *dzs], strict=True))
    assert_same_layers(a, b)


def test_devices_without_samples():
    layer = new_layer(3)
    before = copy.deepcopy(layer.state_dict())
    ys, dxs = step(layer, [torch.empty(0, 3, 2)] * 3, [torch.empty(0, 3, 2)] * 3)
    assert [y.shape for y in ys] == [dx.shape for dx in dxs] == [(0, 3, 2)] * 3
    assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())
    assert not layer.weight.grad.any()
    # The dtype of a device without samples is its own.
    half = torch.randn(4, 3, dtype=torch.float16)
    ys, dxs = step(layer, [torch.empty(0, 3), half], [torch.empty(0, 3), half])
    assert [t.dtype for t in (*ys, *dxs)] == [torch.float32, torch.float16] * 2
    assert layer.num_batches_tracked == 1


@pytest.mark.parametrize("momentum", (0.3, None))
def test_running_statistics_change_once_per_step_exact(momentum):
    x = torch.randn(3, 8, 5)
    one, many = (new_layer(5, momentum=momentum) for _ in range(2))
    parallel = SelfDataParallel(many, ["cpu"] * 4, replicate=True)
    for batch in x:
        one(batch)
        parallel(batch)
    assert one.num_batches_tracked == many.num_batches_tracked == 3
    assert torch.equal(one.running_mean, many.running_mean)
    assert torch.equal(one.running_var, many.running_var)


@pytest.mark.parametrize("replicate", (False, True))
def test_evaluation_is_per_device_exact(replicate):
    layer = new_layer(3)
    layer(torch.randn(8, 3, 2))
    before = copy.deepcopy(layer.state_dict())
    model = SelfDataParallel(layer, ["cpu"] * 2, replicate).eval()
    x = torch.randn(5, 3, 2)
    ys = model(x)
    assert [y.shape[0] for y in ys] == [3, 2]
    expected = torch.nn.functional.batch_norm(
        x, layer.running_mean, layer.running_var, layer.weight, layer.bias
    )
    assert torch.equal(torch.cat(ys), expected)
    assert torch.equal(torch.cat(layer([x[:1], x[1:]])), expected)
    assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())
    torch.cat(ys).sum().backward()
    assert layer.weight.grad is not None


def test_one_device_runs_without_threads_exact():
    a, b = residual(), residual()
    seen = []
    a.stem.register_forward_hook(lambda *_: seen.append(threading.current_thread()))
    x = torch.randn(4, 3, 5, 5).double()
    (y,) = SelfDataParallel(a, ["cpu"])(x)
    assert torch.equal(y, b(x))
    assert seen == [threading.current_thread()]


def test_grad_mode_reaches_the_devices():
    model = SelfDataParallel(residual(), ["cpu"] * 2, replicate=True)
    x = torch.randn(4, 3, 5, 5).double()
    with torch.no_grad():
        assert not any(y.requires_grad for y in model(x))
    with torch.inference_mode():
        assert all(y.is_inference() for y in model(x))
    assert all(y.requires_grad and not y.is_inference() for y in model(x))
    assert model.module.bn1.num_batches_tracked == 3


def test_autocast_reaches_the_devices():
    model = SelfDataParallel(residual(torch.float32), ["cpu"] * 3)
    seen = []
    model.module.bn1.register_forward_hook(lambda m, i, o: seen.append((i[0].dtype, o.dtype)))
    for dtype in (torch.bfloat16, torch.float16):
        seen.clear()
        with torch.autocast("cpu", dtype):
            ys = model(torch.randn(5, 3, 6, 6))
        assert [y.dtype for y in ys] == [dtype] * 3
        assert seen == [(dtype, dtype)] * 3
    sum(y.float().sum() for y in ys).backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    assert not any(y.dtype != torch.float32 for y in model(torch.randn(5, 3, 6, 6)))


def test_replicas_of_modules_with_state():
    """Plain layers: the first device's buffers stay; frozen, tied and recurrent parameters."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.plain = nn.BatchNorm1d(3)
            self.sync = syncbn.SyncBatchNorm(3)
            self.frozen = nn.Linear(3, 3).requires_grad_(False)
            self.a = nn.Linear(3, 3, bias=False)
            self.b = nn.Linear(3, 3, bias=False)
            self.b.weight = self.a.weight
            self.lstm = nn.LSTM(3, 3)

        def forward(self, x):
            assert len(list(self.parameters())) == 11
            y = self.b(self.a(self.frozen(self.sync(self.plain(x)))))
            return self.lstm(y)[0]

    torch.manual_seed(7)
    model = Model().double()
    shared = copy.deepcopy(model)
    x = torch.randn(6, 3, dtype=torch.float64)
    ys = SelfDataParallel(model, ["cpu"] * 2, replicate=True)(x)
    zs = SelfDataParallel(shared, ["cpu"] * 2)(x)
    assert all(torch.equal(y, z) for y, z in zip(ys, zs, strict=True))
    for outputs in (ys, zs):
        torch.cat(outputs).square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), shared.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None) == name.startswith("frozen")
        if p.grad is not None:  # two summands of each, in either order
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12, msg=name)
    # var of the first share alone; the shared module has seen both.
    plain = nn.BatchNorm1d(3).double()
    plain(x[:3])
    assert torch.equal(model.plain.running_var, plain.running_var)
    plain(x[3:])
    assert torch.equal(shared.plain.running_var, plain.running_var)


def test_second_form_of_inputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = syncbn.SyncBatchNorm(3)

        def forward(self, x, scale):
            return {"y": self.bn(x) * scale}

    x = torch.randn(4, 3)
    one, many = Two(), Two()
    outputs = SelfDataParallel(many, ["cpu"] * 2)([(x[:1], 2.0), (x[1:], torch.tensor(2.0))])
    assert torch.equal(torch.cat([o["y"] for o in outputs]), one(x, 2.0)["y"])
