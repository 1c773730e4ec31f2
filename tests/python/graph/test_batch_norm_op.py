# SPDX-License-Identifier: Apache-2.0
"""syncbn.ops.batch_norm on one rank: formulas, bits of the layer, variables, tracing, errors."""

import pytest
import torch

from rank import Rank
from support import TORCH_DTYPES, Operators, layouts_of
from syncbn.operators import ops
from syncbn.ops import batch_norm, batch_norm_


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


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_training_has_the_layers_bits_exact(dtype):
    """Those of the layer's operators."""
    x, dy = samples(dtype, (6, 3, 4, 5)), samples(dtype, (6, 3, 4, 5), seed=1)
    mean, var, scale, bias, batches = variables()
    rank = Rank(x, scale, bias)
    y = rank.step()
    gradients = rank.finish_backward(rank.begin_backward(dy, dtypes=(torch.float32,) * 2))
    for layout, samples_of in layouts_of(x).items():
        scale, bias = (t.detach().requires_grad_() for t in (scale, bias))
        mine = samples_of.detach().requires_grad_()
        out = batch_norm(mine, mean, var, scale, bias, batches, epsilon=1e-5)
        out.y.backward(dy)
        assert torch.equal(out.y, y), layout
        assert all(map(torch.equal, (mine.grad, scale.grad, bias.grad), gradients)), layout
        assert torch.equal(out.batch_mean, rank.mean) and torch.equal(out.batch_var, rank.var)


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


def test_second_derivatives_are_refused():
    x = samples().requires_grad_()
    y = batch_norm(x, *variables()).y
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_is_one_operator_in_each_direction():
    x = samples().requires_grad_()
    with Operators() as operators:
        batch_norm(x, *variables()).y.sum().backward()
    names = [name for name, _ in operators.calls if hasattr(ops, name)]
    assert names == ["batch_norm", "batch_norm_backward"]


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


def test_traces_to_one_node_exact():
    given = variables(batches=1)
    x = samples("float32")

    def function(x):
        return batch_norm(x, *given, is_infer=True).y

    traced = torch.fx.symbolic_trace(function)
    targets = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert targets == [batch_norm, getattr]
    assert torch.equal(traced(x), function(x))
