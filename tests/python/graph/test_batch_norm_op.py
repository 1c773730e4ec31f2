# SPDX-License-Identifier: Apache-2.0
"""syncbn.ops.batch_norm on one rank: formulas, bits of the layer, variables, tracing, errors."""

from fractions import Fraction

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import syncbn
from support import TORCH_DTYPES, layouts_of, run_layer
from syncbn.ops import batch_norm, batch_norm_

UNIT = 2.0**-53


def samples(dtype="float64", shape=(5, 3, 2), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 3 + 1).to(TORCH_DTYPES[dtype])


def variables(channels=3, dtype=torch.float32, batches=0):
    """estimated_mean, estimated_var, scale, bias, batches."""
    return (
        torch.linspace(-1, 1, channels).to(dtype),
        torch.linspace(1, 3, channels).to(dtype),
        torch.linspace(-2, 0.5, channels),
        torch.linspace(0.25, 1, channels),
        torch.tensor([batches]),
    )


def exact_mean(values) -> float:
    """Of numbers or of products of numbers, rounded once."""
    return float(sum(values, Fraction(0)) / len(values))


def formula(x, dy, scale, bias, epsilon):
    """(values, bounds, mean, var) of one channel of float64 in lists.

    Sums are exact here, and in the operator nearly so (its partial sums carry 106 bits). It rounds
    mean, variance and the sums of the gradient once or twice, and at most 8 operations lie between
    them and a result, each off by one UNIT of the terms that it combines; the formula here has as
    many. So the bound is 16 UNITs of the sum of the terms' magnitudes.
    """
    fx, fdy = [Fraction(v) for v in x], [Fraction(v) for v in dy]
    mean = exact_mean(fx)
    var = float(sum(((v - sum(fx) / len(fx)) ** 2 for v in fx), Fraction(0)) / len(fx))
    rstd = (var + epsilon) ** -0.5
    hat = [float(v - sum(fx) / len(fx)) * rstd for v in fx]
    y = [h * scale + bias for h in hat]
    dhat = [Fraction(a) * Fraction(b) for a, b in zip(dy, hat, strict=True)]
    dscale, dbias = float(sum(dhat)), float(sum(fdy))
    mean_dy, mean_dhat = exact_mean(fdy), exact_mean(dhat)
    dx = [scale * rstd * (a - mean_dy - h * mean_dhat) for a, h in zip(dy, hat, strict=True)]
    # Magnitudes: x and mean enter apart, so their difference may cancel.
    size = [(abs(v) + abs(mean)) * rstd for v in x]
    size_dhat = sum(abs(a) * s for a, s in zip(dy, size, strict=True))
    bounds = {
        "y": [16 * UNIT * (abs(scale) * s + abs(bias)) for s in size],
        "dx": [
            16 * UNIT * abs(scale) * rstd * (abs(a) + sum(map(abs, dy)) / len(dy) + s * size_dhat)
            for a, s in zip(dy, size, strict=True)
        ],
        "dscale": [16 * UNIT * size_dhat],
        "dbias": [UNIT * abs(dbias)],
    }
    values = {"y": y, "dx": dx, "dscale": [dscale], "dbias": [dbias]}
    return values, bounds, mean, var


def test_training_is_the_formula():
    x, dy = samples().requires_grad_(), samples(seed=1)
    mean, var, scale, bias, batches = variables(dtype=torch.float64)
    scale, bias = scale.double().requires_grad_(), bias.double().requires_grad_()
    out = batch_norm(x, mean, var, scale, bias, batches, epsilon=1e-3)
    out.y.backward(dy)
    for c in range(3):
        expected, bounds, batch_mean, batch_var = formula(
            x[:, c].flatten().tolist(),
            dy[:, c].flatten().tolist(),
            scale[c].item(),
            bias[c].item(),
            1e-3,
        )
        got = {
            "y": out.y[:, c].flatten().tolist(),
            "dx": x.grad[:, c].flatten().tolist(),
            "dscale": [scale.grad[c].item()],
            "dbias": [bias.grad[c].item()],
        }
        for name, values in got.items():
            for value, want, bound in zip(values, expected[name], bounds[name], strict=True):
                assert abs(value - want) <= bound, name
        # Two and three roundings of one exact number.
        assert abs(out.batch_mean[c].item() - batch_mean) <= 2 * UNIT * abs(batch_mean)
        assert abs(out.batch_var[c].item() - batch_var) <= 4 * UNIT * batch_var


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_training_has_the_layers_bits_exact(dtype):
    x, dy = samples(dtype, (6, 3, 4, 5)), samples(dtype, (6, 3, 4, 5), seed=1)
    mean, var, scale, bias, batches = variables()
    expected = run_layer(x, dy, scale, bias, eps=1e-5)
    layer = syncbn.SyncBatchNorm(3, eps=1e-5)
    with torch.no_grad():
        layer.weight.copy_(scale)
        layer.bias.copy_(bias)
    for layout, samples_of in layouts_of(x).items():
        scale, bias = (t.detach().requires_grad_() for t in (scale, bias))
        mine = samples_of.detach().requires_grad_()
        out = batch_norm(mine, mean, var, scale, bias, batches, epsilon=1e-5)
        out.y.backward(dy)
        for actual, name in (
            (out.y, "y"),
            (out.batch_mean, "mean"),
            (out.batch_var, "var"),
            (mine.grad, "dx"),
        ):
            assert torch.equal(actual, expected[name]), (layout, name)
        theirs = x.detach().requires_grad_()
        layer.zero_grad()
        y = layer(theirs)
        y.backward(dy)
        assert torch.equal(out.y, y) and torch.equal(mine.grad, theirs.grad)
        assert torch.equal(scale.grad, layer.weight.grad)
        assert torch.equal(bias.grad, layer.bias.grad)


def test_absent_scale_and_bias_are_one_and_zero_exact():
    mean, var, _, _, batches = variables()
    x = samples("float32")
    absent = batch_norm(x, mean, var, None, None, batches)
    given = batch_norm(x, mean, var, torch.ones(3), torch.zeros(3), batches)
    assert torch.equal(absent.y, given.y)


def test_first_batch_assigns_and_later_ones_average_exact():
    """Batches of mean 4 and 8 and biased variance 5 and 16; momentum 0.75 keeps all exact."""
    mean, var, batches = torch.full((1,), 100.0), torch.full((1,), 7.0), torch.tensor([0])
    first, second = torch.tensor([[1.0], [3], [5], [7]]), torch.tensor([[4.0], [12]])
    options = {"momentum": 0.75}
    batch_norm_(first, mean, var, None, None, batches, **options)
    assert (mean.item(), var.item(), batches.item()) == (4, 5, 1)
    out = batch_norm_(second, mean, var, None, None, batches, **options)
    assert (mean.item(), var.item(), batches.item()) == (5, 7.75, 2)
    assert (out.batch_mean.item(), out.batch_var.item()) == (8, 16)
    # No elements: zeros for the batch, and the variables stay.
    out = batch_norm_(second[:0], mean, var, None, None, batches, **options)
    assert (mean.item(), var.item(), batches.item()) == (5, 7.75, 2)
    assert (out.batch_mean.item(), out.batch_var.item()) == (0, 0)


def test_empty_batch_has_zero_gradients():
    x = torch.empty(0, 3, 4, requires_grad=True)
    mean, var, scale, bias, batches = variables()
    scale.requires_grad_()
    y = batch_norm(x, mean, var, scale, bias, batches).y
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, 3, 4)
    assert torch.equal(scale.grad, torch.zeros(3))


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_estimates_are_rounded_once_exact(dtype):
    """momentum = 0.75: products and sums of these numbers are exact in float64."""
    mean = torch.tensor([0.3333]).to(TORCH_DTYPES[dtype])
    var = torch.tensor([1.7777]).to(TORCH_DTYPES[dtype])
    x = torch.tensor([[1.0], [1.5]])
    out = batch_norm(x, mean, var, None, None, torch.tensor([3]), momentum=0.75)
    for saved, old, batch in ((out.saved_mean, mean, 1.25), (out.saved_var, var, 0.0625)):
        assert saved.dtype == old.dtype
        assert torch.equal(saved, (old.double() * 0.75 + 0.25 * batch).to(old.dtype))


def test_functional_form_changes_no_input_exact():
    x = samples("float32")
    given = variables(batches=4)
    before = [t.clone() for t in given]
    functional = batch_norm(x, *given)
    assert all(map(torch.equal, given, before))
    assert functional.saved_batches.item() == 5
    in_place = batch_norm_(x, *given)
    assert in_place.saved_mean is given[0] and in_place.saved_var is given[1]
    assert in_place.saved_batches is given[4]
    assert all(map(torch.equal, functional, in_place))


def test_inference_uses_the_estimates_and_changes_nothing_exact():
    x = samples("float32").requires_grad_()
    given = variables(batches=4)
    before = [t.clone() for t in given]
    out = batch_norm_(x, *given, is_infer=True, epsilon=0.5)
    assert all(map(torch.equal, given, before))
    assert torch.equal(out.batch_mean, given[0].double())
    assert torch.equal(out.batch_var, given[1].double())
    copies = batch_norm(x, *given, is_infer=True, epsilon=0.5)
    assert all(map(torch.equal, copies, out))
    assert copies.saved_mean.data_ptr() != given[0].data_ptr()
    mean, var, scale, bias, _ = (t.double()[:, None] for t in given)
    expected = (x.double() - mean) / (var + 0.5).sqrt() * scale + bias
    # float32: four roundings, of x - mean, of the factor, of the sum and of bias.
    bound = 4 * 2.0**-24 * ((x.abs() + mean.abs()) / (var + 0.5).sqrt() * scale.abs() + bias.abs())
    assert ((out.y - expected).abs() <= bound).all()


def test_global_estimates_are_the_updated_ones_and_constants_exact():
    dy = samples("float32", seed=1)
    given = variables(batches=4)
    runs = []
    for use in ("training", "inference"):
        x = samples("float32").requires_grad_()
        scale, bias = (t.detach().clone().requires_grad_() for t in given[2:4])
        estimates = (*given[:2], scale, bias, given[4])
        if use == "training":
            out = batch_norm(x, *estimates, use_global_est=True)
            saved = (out.saved_mean, out.saved_var)
        else:
            out = batch_norm(x, *saved, *estimates[2:], is_infer=True)
        out.y.backward(dy)
        runs.append((out.y, x.grad, scale.grad, bias.grad))
    assert all(map(torch.equal, *runs))
    plain = batch_norm(samples("float32"), *given)
    assert torch.equal(saved[0], plain.saved_mean) and torch.equal(saved[1], plain.saved_var)
    factor = given[2].double() / (saved[1].double() + 1e-6).sqrt()
    expected = factor[:, None] * dy.double()
    # Two roundings to float32 of factor and product, with room for those of the factor in float64.
    assert ((runs[0][1] - expected).abs() <= 2.5 * 2.0**-24 * expected.abs()).all()


def test_gradients_by_differences():
    x = samples().requires_grad_()
    mean, var, scale, bias, batches = variables(dtype=torch.float64, batches=1)
    scale, bias = scale.double().requires_grad_(), bias.double().requires_grad_()

    def y(x, scale, bias, **options):
        return batch_norm(x, mean, var, scale, bias, batches, **options).y

    assert torch.autograd.gradcheck(y, (x, scale, bias))
    assert torch.autograd.gradcheck(lambda *t: y(*t, is_infer=True), (x, scale, bias))


def test_gradients_that_nobody_needs_are_not_made():
    mean, var, scale, bias, batches = variables()
    x = samples("float32")
    assert not batch_norm(x, mean, var, scale, bias, batches).y.requires_grad
    bias.requires_grad_()
    out = batch_norm(x, mean, var, scale, bias, batches)
    out.y.backward(torch.ones_like(x))
    assert torch.equal(bias.grad, torch.full((3,), 10.0))
    assert not any(t.requires_grad for t in out[1:])


def test_second_derivatives_are_refused():
    x = samples().requires_grad_()
    y = batch_norm(x, *variables()).y
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "syncbn":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def test_is_one_operator_in_each_direction():
    x = samples().requires_grad_()
    with Calls() as calls:
        batch_norm(x, *variables()).y.sum().backward()
    assert calls.names == ["batch_norm", "batch_norm_backward"]


@pytest.mark.parametrize("options", ({}, {"is_infer": True}, {"use_global_est": True}), ids=str)
def test_operators_pass_opcheck(options):
    x, dy = samples("float32"), samples("float32", seed=1)
    given = variables(batches=2)
    kind = (options.get("is_infer", False), options.get("use_global_est", False))
    others = (1e-6, 0.99, "batch_norm", None)
    torch.library.opcheck(torch.ops.syncbn.batch_norm, (x, *given, *kind, *others))
    *_, saved = torch.ops.syncbn.batch_norm(x, *given, *kind, *others)
    constant = bool(options)
    for needs_x, dtype in ((True, torch.float32), (False, None)):
        arguments = (dy, x, given[2], saved, constant, needs_x, dtype, dtype, *others)
        torch.library.opcheck(torch.ops.syncbn.batch_norm_backward, arguments)


@pytest.mark.parametrize("options", ({"is_infer": True}, {}), ids=("inference", "training"))
def test_compiled_is_equal_exact(options):
    given = variables(batches=1)

    def function(x, *given):
        return batch_norm_(x, *given, **options).y

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    results = []
    for call in (function, compiled):
        copies = [t.clone() for t in given]
        x = samples("float32").requires_grad_()
        y = call(x, *copies)
        y.square().sum().backward()
        results.append((y, x.grad, *copies))
    assert all(map(torch.equal, *results))


class Derived(torch.Tensor):
    """A class of nobody."""


@pytest.mark.parametrize("function", (batch_norm, batch_norm_))
@pytest.mark.parametrize("place", ("x", "estimated_mean", "scale"))
@pytest.mark.parametrize("is_infer", (False, True))
def test_takes_tensors_of_other_classes_exact(function, place, is_infer):
    names = ("x", "estimated_mean", "estimated_var", "scale", "bias", "batches")
    results = []
    for cls in (torch.Tensor, Derived):
        given = dict(zip(names, (samples("float32"), *variables())))
        x = given["x"].requires_grad_()
        given[place] = given[place].as_subclass(cls)
        out = function(**given, is_infer=is_infer)
        assert type(out) is syncbn.ops.BatchNormOutputs and type(out.y) is cls
        out.y.relu_().square().sum().backward()
        results.append([t.as_subclass(torch.Tensor) for t in (*out, x.grad)])
    assert all(map(torch.equal, *results))


def test_traces_to_one_node_exact():
    given = variables(batches=1)
    x = samples("float32")

    def function(x):
        return batch_norm(x, *given, is_infer=True).y

    traced = torch.fx.symbolic_trace(function)
    targets = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert targets == [batch_norm, getattr]
    assert torch.equal(traced(x), function(x))


@pytest.mark.parametrize("shape", ((), (1,), (1, 1)))
def test_counter_of_any_shape_with_one_entry_exact(shape):
    mean, var, scale, bias, batches = variables(batches=2)
    counter = batches.clone().view(shape)
    estimates = mean.clone(), var.clone()
    out = batch_norm_(samples(), *estimates, scale, bias, counter)
    expected = batch_norm(samples(), mean, var, scale, bias, batches)
    assert out.saved_batches is counter and counter.shape == shape and counter.item() == 3
    assert torch.equal(estimates[0], expected.saved_mean)
    assert torch.equal(estimates[1], expected.saved_var)


@pytest.mark.parametrize("counter", (torch.tensor([0, 0]), torch.tensor(0, dtype=torch.int32)))
def test_refused_counter_changes_nothing(counter):
    mean, var, scale, bias, _ = variables()
    estimates, before = (mean.clone(), var.clone()), counter.clone()
    with pytest.raises(ValueError, match="batches: got"):
        batch_norm_(samples(), *estimates, scale, bias, counter)
    assert torch.equal(estimates[0], mean) and torch.equal(estimates[1], var)
    assert torch.equal(counter, before)
