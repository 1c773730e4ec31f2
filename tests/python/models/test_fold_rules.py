# SPDX-License-Identifier: Apache-2.0
"""syncbn.fold: which batch norms fold, what is reported, what is refused."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import syncbn
from fold_support import Calls, check_equal, exact_input, fold_reporting, make_exact, norms_of


def two_users(m, x):
    y = m.conv(x)
    return m.bn2(m.conv2(m.bn(y))) + y


def output_kept(m, x):
    y = m.conv(x)
    return torch.cat((m.bn(y), m.bn2(m.conv2(y))))


def conv_twice(m, x):
    return m.bn(m.conv(x)) + m.conv(x + 1)


def norm_twice(m, x):
    return m.bn(m.conv(x)) + m.bn(m.conv2(m.conv(x)))


def weight_read(m, x):
    return m.bn(m.conv(x)) * m.conv.weight.abs().max()


def statistics_read(m, x):
    return m.bn(m.conv(x)) * m.bn.running_mean.view(1, -1, 1, 1)


def norm_first(m, x):
    return m.conv2(m.bn(F.relu(m.conv(x))))


def number_read(m, x):
    return m.bn(m.conv(x)) * (2 if m.bn.affine and m.bn.num_features == 4 else 1)


def keywords(m, x):
    return m.bn2(m.conv2(input=m.bn(m.conv(input=x))))


@pytest.mark.parametrize(
    "function, left, reason",
    (
        (two_users, ["bn"], "follows conv, whose output has other users"),
        (output_kept, ["bn"], "follows conv, whose output has other users"),
        (conv_twice, ["bn"], "follows conv, which is called 2 times"),
        (norm_twice, ["bn"], "is called 2 times"),
        (weight_read, ["bn"], "follows conv, which has tensors that the model reads elsewhere"),
        (statistics_read, ["bn"], "has tensors that the model reads elsewhere"),
        (number_read, ["bn"], "bn has attributes that the model reads"),
        (norm_first, ["bn"], "does not directly follow a convolution or linear layer"),
        (keywords, [], ""),
    ),
)
@pytest.mark.parametrize("synchronized", (False, True))
def test_uses_decide(function, left, reason, synchronized):
    model = make_exact(Calls(function))
    if function not in (two_users, output_kept, keywords):
        model.bn2 = nn.Identity()  # it has no call
    if synchronized:
        model = syncbn.convert_sync_batchnorm(model)
    kept = left if synchronized and function in (statistics_read, number_read) else ()
    assert reason in check_equal(model, exact_input(2, 3, 5, 5), left=left, kept=kept)


def test_the_input_as_a_keyword():
    """What takes the layers' place, nn.Identity and an activation, is called with it too."""
    reference = make_exact(Calls(lambda m, x: m.bn2(input=m.conv2(m.bn(input=m.conv(x))))))
    x = exact_input(2, 3, 5, 5)
    assert check_equal(reference, x) == ""
    model = syncbn.convert_sync_batchnorm(copy.deepcopy(reference))
    model.bn2.activation = "relu"
    folded, report = fold_reporting(model)
    assert report == "" and norms_of(folded) == []
    assert torch.equal(folded(x), reference.eval()(x).relu())


@pytest.mark.parametrize("synchronized", (False, True))
def test_layer_without_a_call_is_reported(synchronized):
    model = make_exact(Calls(lambda m, x: m.bn(m.conv(x))))
    if synchronized:
        model = syncbn.convert_sync_batchnorm(model)
    kept = ["bn2"] if synchronized else []
    report = check_equal(model, exact_input(2, 3, 5, 5), left=["bn2"], kept=kept)
    assert "bn2 is called 0 times" in report


def test_no_running_statistics():
    layers = (nn.BatchNorm2d, syncbn.SyncBatchNorm)
    for layer in layers:
        norm = layer(4, track_running_stats=False)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), norm).double()
        report = check_equal(model, exact_input(2, 3, 5, 5), left=["1"])
        assert "has no running statistics" in report


def test_hooks_and_parametrizations():
    x = exact_input(2, 3, 5, 5)
    for hooked in ("conv", "bn"):
        for synchronized in (False, True):
            model = make_exact(Calls(keywords))
            if synchronized:
                model = syncbn.convert_sync_batchnorm(model)
            getattr(model, hooked).register_forward_hook(lambda module, args, output: output + 1)
            kept = ["bn"] if synchronized and hooked == "bn" else []
            assert "has hooks" in check_equal(model, x, left=["bn"], kept=kept)
    model = make_exact(Calls(keywords))
    nn.utils.parametrize.register_parametrization(model.conv, "weight", nn.ReLU())
    check_equal(model, x, left=["bn"])


def test_parameters_shared_by_two_convolutions():
    model = make_exact(Calls(lambda m, x: m.bn2(m.conv2(F.relu(m.bn(m.conv(x)))))))
    model.conv = nn.Conv2d(4, 4, 3, padding=1).double()
    model.conv.weight = model.conv2.weight
    make_exact(model)
    check_equal(model, exact_input(2, 4, 5, 5))


def test_one_module_under_two_names():
    model = make_exact(Calls(keywords))
    model.also = nn.ModuleList([model.conv, model.bn])
    check_equal(model, exact_input(2, 3, 5, 5))
    folded = syncbn.fold(model)
    assert folded.also[0] is folded.conv and folded.also[1] is folded.bn


class InAList(nn.Module):
    """Calls its layers by references that the module knows nothing of."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.bn2 = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.layers = [self.conv, self.bn, self.bn2]

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("activation", ("none", "relu"))
def test_layers_referred_to_by_a_list(activation):
    model = InAList()
    model.bn, model.bn2 = (syncbn.SyncBatchNorm(4, activation=activation) for _ in range(2))
    model.layers = [model.conv, model.bn, model.bn2]
    folded, report = fold_reporting(make_exact(model))
    assert "1 of 2" in report and "bn2 does not directly follow" in report
    assert folded.layers == [folded.conv, folded.bn, folded.bn2]
    x = exact_input(2, 3, 5, 5)
    assert torch.equal(folded(x), model.eval()(x))


class Branches(nn.Module):
    """Cannot be traced: which way it goes depends on its input."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)

    def forward(self, x):
        return self.bn(self.conv(x)) if x.sum() > 0 else self.conv(x)


@pytest.mark.parametrize("synchronized", (False, True))
def test_submodule_that_cannot_be_traced(synchronized):
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), Branches(), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
    )
    model = make_exact(model)
    if synchronized:
        model = syncbn.convert_sync_batchnorm(model)
    kept = ["2.bn"] if synchronized else []
    for sign in (1, -1):
        report = check_equal(model, sign * exact_input(2, 3, 5, 5), left=["2.bn"], kept=kept)
    assert "lies in 2, which torch.fx cannot trace (TraceError: " in report


def test_model_that_cannot_be_traced():
    model = Branches()
    with pytest.raises(ValueError, match="model: got Branches, .* cannot trace .*, expected one"):
        syncbn.fold(model)
    assert model.training and isinstance(model.bn, nn.BatchNorm2d)


class WithDefaults(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)

    def forward(self, x, scale=None, twice=False, *, names=("a", "b")):
        y = self.conv(x)
        if scale is not None:
            y = y * scale
        y = self.bn(y)
        return y + y if twice or len(names) > 2 else y


def test_optional_arguments_keep_their_defaults():
    check_equal(make_exact(WithDefaults()), exact_input(2, 3, 5, 5))


def test_model_in_training_mode_with_frozen_weights_and_channels_last():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    model = model.to(memory_format=torch.channels_last).requires_grad_(False)
    folded = syncbn.fold(model.train())
    assert folded[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert not folded[0].weight.requires_grad
    assert not folded.training and model.training


def test_linear_refuses_what_the_folding_does_not_hold_for():
    """On (N, L, C) batch norm takes axis 1 for the channels, here of the same size."""
    folded = syncbn.fold(nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)))
    folded(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"input: got 3D input, expected 2D \(N, 3\)"):
        folded(torch.zeros(2, 5, 3))


def test_weights_beyond_the_range_are_not_folded():
    """100 / sqrt(1e-6) times 1 does not fit float16, the layer's output for small input does."""
    model = nn.Sequential(nn.Conv1d(1, 1, 1, bias=False), nn.BatchNorm1d(1, eps=1e-6)).half()
    with torch.no_grad():
        model[0].weight.fill_(1)
        model[1].weight.fill_(100)
        model[1].running_var.zero_()
    report = check_equal(model, torch.full((1, 1, 2), 2.0**-10).half(), left=["1"])
    assert "beyond the range of torch.float16" in report


class Activated(nn.Module):
    """A layer with an activation of its own, in its place and where it cannot fold."""

    def __init__(self, norm):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = norm(4)
        self.norm2 = norm(4)

    def forward(self, x):
        return self.norm2(self.norm(self.conv(x)))


@pytest.mark.parametrize(
    "kind, module", (("relu", nn.ReLU()), ("leaky_relu", nn.LeakyReLU(0.25))), ids=str
)
def test_activation_of_the_layer_stays(kind, module):
    reference = make_exact(Activated(nn.BatchNorm2d)).eval()
    model = Activated(syncbn.SyncBatchNorm).double()
    model.load_state_dict(reference.state_dict())
    for norm in (model.norm, model.norm2):
        norm.eps, norm.activation, norm.negative_slope = 2.0**-10, kind, 0.25
    folded, report = fold_reporting(model)
    assert re.findall(r"^  (\S+) ", report, re.MULTILINE) == ["norm2"]
    assert type(folded.norm) is type(module)
    assert not any(type(m) is syncbn.SyncBatchNorm for m in folded.modules())
    x = exact_input(2, 3, 6, 6)
    with torch.no_grad():
        expected = module(reference.norm2(module(reference.norm(reference.conv(x)))))
        assert torch.equal(folded(x), expected)


def test_layers_with_a_process_group():
    """Neither a held process group nor the name of one hinders the copy; none is needed later."""
    x = exact_input(2, 3, 5, 5)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.new_group([0])
        for norm in (nn.SyncBatchNorm, syncbn.SyncBatchNorm):
            layers = [nn.Conv2d(3, 4, 3), norm(4, process_group=group), nn.ReLU()]
            model = make_exact(nn.Sequential(*layers, norm(4, process_group=group))).eval()
            expected = model(x)
            folded, report = fold_reporting(model)
            assert norms_of(folded) == ["3"] and "3 does not directly follow" in report
            assert model[1].process_group is group
            assert torch.equal(folded(x), expected)
    finally:
        dist.destroy_process_group()
    assert torch.equal(folded(x), expected)


def test_models_without_a_pair():
    x = exact_input(2, 4, 5, 5)
    assert check_equal(make_exact(nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())), x) == ""
    check_equal(make_exact(nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1))), x, left=["0"])
    layer = make_exact(syncbn.SyncBatchNorm(4)).eval()
    folded, report = fold_reporting(layer)
    assert type(folded) is syncbn.SyncBatchNorm and not folded.training
    assert "the model has no layer before it" in report
    assert torch.equal(folded(x), layer(x))


def test_what_is_not_a_module():
    with pytest.raises(TypeError, match="model: got dict, expected a torch.nn.Module"):
        syncbn.fold({})
