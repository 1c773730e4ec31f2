# SPDX-License-Identifier: Apache-2.0
"""Bad input of every kind is one clear error that changes nothing, and the next step has the bits
of a layer that never saw it; running statistics are whole when an exception comes."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import syncbn
from bad_input_table import CASES, INPUTS, MASKED, MASKS, RESIDUALS, C, X
from support import new_layer


def state_of(layer):
    """What a refused call must not change."""
    tensors = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    tensors["call"] = layer.state.call
    gradients = {f"{name}.grad": p.grad for name, p in layer.named_parameters()}
    return {k: None if t is None else t.detach().clone() for k, t in (tensors | gradients).items()}


def equal(a, b):
    assert a.keys() == b.keys()
    for name, value in a.items():
        if value is None or b[name] is None:
            assert value is b[name], name
        else:
            assert torch.equal(value, b[name]), name


def make():
    """A layer that has made a step, and so has gradients and a counter."""
    layer = new_layer(C, activation="leaky_relu")
    step(layer)
    return layer


def step(layer, x=X):
    x = x.clone().requires_grad_()
    y = layer(x, x.detach() * 2)
    y.backward(torch.cos(x.detach()))
    return {"y": y.detach(), "dx": x.grad, **state_of(layer)}


@pytest.fixture(scope="module")
def expected():
    return step(make())


@pytest.mark.parametrize("name, call, text", CASES, ids=[case[0] for case in CASES])
def test_bad_input_is_one_error_and_changes_nothing(name, call, text, expected):
    layer = make()
    before, options = state_of(layer), dict(layer.__dict__)
    with pytest.raises(ValueError, match=text) as caught:
        call(layer)
    assert "\n" not in str(caught.value)
    layer.__dict__.update(options)
    if name.startswith("counter"):  # the case's own change
        layer.num_batches_tracked.copy_(before["num_batches_tracked"])
    equal(state_of(layer), before)
    equal(step(layer), expected)


def test_the_names_of_other_libraries_are_refused():
    with pytest.raises(TypeError, match="^slope: got an argument .* expected negative_slope$"):
        syncbn.SyncBatchNorm(C, activation="leaky_relu", slope=0.1)
    with pytest.raises(TypeError, match="^sync_bn: got an argument .* an option of SyncBatchNorm$"):
        syncbn.SyncBatchNorm(C, sync_bn=True)


EVALUATION = {
    **{name: (x,) for name, (x, _) in INPUTS.items()},
    **{name: (X, z) for name, (z, _) in RESIDUALS.items()},
    **{name: (X, None, m) for name, (m, _) in MASKS.items()},
    "residual of a list": ([X, X], [X]),
}
#: What PyTorch's operator, which evaluation is, can take.
TAKEN = ("input mkldnn", "input one value", "inputs nested")


@pytest.mark.parametrize("name", [name for name in EVALUATION if name not in TAKEN])
def test_in_evaluation_mode(name, expected):
    """The input's errors are PyTorch's, those of residual and mask the layer's own."""
    layer = make().eval()
    before = state_of(layer)
    with pytest.raises((ValueError, RuntimeError, NotImplementedError)) as caught:
        layer(*EVALUATION[name])
    if "input" not in name:
        assert str(caught.value).startswith(name.split()[0] + ": got ")
    equal(state_of(layer), before)
    equal(step(layer.train()), expected)


def test_no_features_and_eps_zero_are_no_errors():
    assert syncbn.SyncBatchNorm(0)(torch.randn(3, 0)).shape == (3, 0)
    assert syncbn.SyncBatchNorm(C, eps=0)(X).isfinite().all()


def _replace_weight(layer, x):
    layer.weight.data = torch.ones(C + 1)


def _free_input(layer, x):
    x.untyped_storage().resize_(0)


BACKWARDS = {
    "one": lambda y, x: y.backward(X),
    "list": lambda ys, x: sum(y.sum() for y in ys).backward(),
    "twice": lambda y, x: torch.autograd.grad(y.sum(), x, create_graph=True),
}


@pytest.mark.parametrize("change", (_replace_weight, _free_input))
@pytest.mark.parametrize("backward", BACKWARDS)
def test_a_tensor_that_changed_before_backward(backward, change):
    layer, x = new_layer(C), X.clone().requires_grad_()
    y = layer([x, x] if backward == "list" else x)
    change(layer, x)
    with pytest.raises(ValueError, match=r"^SyncBatchNorm, call 0, backward, .*: got .*expected"):
        BACKWARDS[backward](y, x)
    assert layer.weight.grad is None


@pytest.mark.parametrize("dy", (X.to_sparse(), MASKED), ids=("sparse", "masked"))
@pytest.mark.parametrize("activation", ("none", "relu"))
def test_a_gradient_that_is_no_plain_tensor(dy, activation):
    y = new_layer(C, activation=activation)(X.clone().requires_grad_())
    with pytest.raises(ValueError, match="^SyncBatchNorm, call 0, backward, .*: gradient: got a"):
        y.backward(dy)


class Interrupt(TorchDispatchMode):
    """Ctrl-C before or after the n-th operator."""

    def __init__(self, at, late):
        super().__init__()
        self.at, self.late = at, late

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.at -= 1
        if self.at == -1 and not self.late:
            raise KeyboardInterrupt
        out = function(*args, **(kwargs or {}))
        if self.at == -1:
            raise KeyboardInterrupt
        return out


def _list_step(layer):
    ys = layer([X[:2].clone().requires_grad_(), X[2:].clone().requires_grad_()])
    torch.cat(ys).cos().sum().backward()


def _checkpointed_step(layer):
    x = X.clone().requires_grad_()
    checkpoint(lambda x: layer(x).tanh(), x, use_reentrant=False).sum().backward()


def _operator_step(layer):
    x = X.clone().requires_grad_()
    variables = (layer.running_mean, layer.running_var)
    counter = layer.num_batches_tracked
    y = syncbn.ops.batch_norm_(x, *variables, layer.weight, layer.bias, counter).y
    y.cos().sum().backward()


STEPS = {
    "layer": ({}, step),
    "welford": ({"statistics": "welford"}, step),
    "cumulative": ({"momentum": None}, step),
    "list": ({}, _list_step),
    "checkpointed": ({}, _checkpointed_step),
    "operator": ({}, _operator_step),
}


@pytest.mark.parametrize("late", (False, True), ids=("before", "after"))
@pytest.mark.parametrize("name", STEPS)
def test_interrupted_steps_are_whole_or_not_at_all_exact(name, late):
    """Running statistics, the counter and the number of the call belong together."""
    options, run = STEPS[name]
    buffers = ("running_mean", "running_var", "num_batches_tracked", "call")

    def statistics_of(layer):
        return {name: t.clone() for name, t in state_of(layer).items() if name in buffers}

    whole = new_layer(C, **options)
    before = statistics_of(whole)
    run(whole)
    after = statistics_of(whole)
    for at in range(200):
        layer = new_layer(C, **options)
        interrupted = False
        try:
            with Interrupt(at, late):
                run(layer)
        except KeyboardInterrupt:
            interrupted = True
        if not interrupted:
            break
        # Not in the handler: the traceback holds torch's checkpoint, whose hooks then stay.
        now = statistics_of(layer)
        done = all(torch.equal(now[k], after[k]) for k in buffers)
        equal(now, after if done else before)
        if not done:
            run(layer)
            equal(statistics_of(layer), after)
    assert 3 < at < 199


@pytest.mark.parametrize("kind", ("pre", "forward", "backward"))
def test_hooks_that_raise(kind, expected):
    layer = make()
    before = state_of(layer)

    def hook(*_):
        raise KeyError("hook")

    register = {
        "pre": layer.register_forward_pre_hook,
        "forward": layer.register_forward_hook,
        "backward": layer.register_full_backward_pre_hook,
    }[kind]
    handle = register(hook)
    with pytest.raises(KeyError, match="hook"):
        step(layer)
    handle.remove()
    now = state_of(layer)
    if kind == "pre":
        equal(now, before)
        equal(step(layer), expected)
    else:  # forward was made, whole
        for name in ("running_mean", "running_var", "num_batches_tracked", "call"):
            assert torch.equal(now[name], expected[name]), name
        assert torch.equal(now["weight.grad"], before["weight.grad"])
