"""convert_sync_batchnorm: what it keeps, leaves and refuses, and what is registered."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import syncbn
from syncbn.models.classes import registered


class OwnBatchNorm(nn.BatchNorm2d):
    """A subclass without a forward of its own; it could override anything else."""


class FrozenBatchNorm(nn.Module):
    """As torchvision's: not derived from PyTorch's batch norm."""

    def __init__(self, channels):
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.ones(channels))


class BatchNormSilu(nn.BatchNorm2d):
    """As timm's BatchNormAct2d: an activation behind the normalization."""

    def __init__(self, channels):
        super().__init__(channels)
        self.act = nn.SiLU()

    def forward(self, x):
        return self.act(super().forward(x))


class SyncBatchNormSilu(syncbn.SyncBatchNorm):
    def forward(self, x):
        return self.act(super().forward(x))


class Double(nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.fixture(autouse=True)
def registry():
    """What a test registers is gone after it."""
    before = dict(registered)
    yield
    registered.clear()
    registered.update(before)


def state_of(net):
    """All that an error must leave as it was."""
    return [
        (m, type(m), dict(vars(m)), dict(m._modules), dict(m._buffers), dict(m._parameters))
        for m in net.modules()
    ]


def refused(net, text, error=ValueError):
    before = state_of(net)
    with pytest.raises(error, match=text):
        syncbn.convert_sync_batchnorm(net)
    assert state_of(net) == before


def test_layers_stay_the_same_objects():
    """torch.nn.SyncBatchNorm.convert_sync_batchnorm makes new ones: references in lists go stale,
    and hooks are lost."""
    layer = nn.BatchNorm2d(4)
    net = nn.ModuleDict({"a": layer, "b": nn.Sequential(layer)})
    net.in_a_list = [layer]
    calls = []
    handle = layer.register_forward_hook(lambda *_: calls.append("forward"))
    layer.register_state_dict_pre_hook(lambda *_: calls.append("state_dict"))
    layer.register_load_state_dict_pre_hook(lambda module, *_: calls.append(module))
    syncbn.convert_sync_batchnorm(net)
    assert net["a"] is layer and net["b"][0] is layer and net.in_a_list[0] is layer
    assert type(layer) is syncbn.SyncBatchNorm and layer.state.name == "a"
    x = torch.randn(2, 4, 3, 3)
    layer(x)
    handle.remove()
    layer(x)
    layer.load_state_dict(layer.state_dict())
    assert calls == ["forward", "state_dict", layer]


def test_a_layer_held_by_a_python_list_alone_is_not_found():
    """PyTorch does not know it either: it has no parameters there."""
    net = nn.Module()
    net.hidden = [nn.BatchNorm2d(4)]
    syncbn.convert_sync_batchnorm(net)
    assert type(net.hidden[0]) is nn.BatchNorm2d


@pytest.mark.parametrize("cls", (nn.BatchNorm1d, nn.SyncBatchNorm))
def test_parametrizations_are_kept_exact(cls):
    """torch.nn.SyncBatchNorm's converter raises a TypeError, with the layers before replaced."""
    layer = cls(4)
    parametrize.register_parametrization(layer, "weight", Double())
    net = nn.Sequential(layer)
    before = type(layer).__name__
    names = list(net.state_dict())
    syncbn.convert_sync_batchnorm(net)
    assert isinstance(layer, syncbn.SyncBatchNorm) and parametrize.is_parametrized(layer, "weight")
    assert list(net.state_dict()) == names
    plain = syncbn.SyncBatchNorm(4)
    nn.init.constant_(plain.weight, 2)
    x = torch.randn(5, 4)
    for each in (layer, copy.deepcopy(layer), plain):
        each.zero_grad()
        each(x).square().sum().backward()
    original = layer.parametrizations.weight.original
    assert torch.equal(layer(x), plain(x)) and torch.equal(original.grad, 2 * plain.weight.grad)
    syncbn.revert_sync_batchnorm(net)
    assert type(layer).__name__ == before and type(layer).__bases__ == (cls,)
    assert layer.parametrizations.weight.original is original and list(net.state_dict()) == names
    parametrize.remove_parametrizations(layer, "weight")
    assert type(layer) is cls and torch.equal(layer.weight, plain.weight)


def test_weight_norm_in_both_forms():
    """By hooks and by parametrization. torch.nn.SyncBatchNorm's converter: a TypeError."""
    for normed in (nn.utils.weight_norm, parametrizations.weight_norm):
        net = nn.Sequential(normed(nn.BatchNorm1d(4), dim=None))
        expected = net[0].weight.detach().clone()
        syncbn.convert_sync_batchnorm(net)
        net(torch.randn(5, 4)).square().sum().backward()
        assert isinstance(net[0], syncbn.SyncBatchNorm)
        assert all(p.grad is not None for p in net.parameters())
        torch.testing.assert_close(net[0].weight, expected, rtol=4 * 2**-23, atol=0)


def test_layers_of_other_classes_are_left_with_one_warning():
    """torch.nn.SyncBatchNorm's converter replaces every subclass by itself, and with it drops what
    the subclass computes; layers that are not derived from batch norm it leaves silently."""
    net = nn.Sequential(
        nn.BatchNorm2d(4), OwnBatchNorm(4), nn.Sequential(BatchNormSilu(4), OwnBatchNorm(4))
    )
    net.add_module("frozen", FrozenBatchNorm(4))
    types = [type(m) for m in net.modules()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        syncbn.convert_sync_batchnorm(net)
    (warning,) = caught
    assert warning.filename == __file__
    text = str(warning.message)
    assert "test_convert_rules.OwnBatchNorm: 1, 2.1\n" in text
    assert "BatchNormSilu: 2.0\n" in text and "FrozenBatchNorm: frozen\n" in text
    assert [type(m) for m in net.modules()] == [
        syncbn.SyncBatchNorm if t is nn.BatchNorm2d else t for t in types
    ]


def test_layers_that_are_no_batch_norm_are_left_silently():
    net = nn.Sequential(nn.InstanceNorm2d(4, track_running_stats=True), nn.GroupNorm(2, 4))
    types = [type(m) for m in net]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [type(m) for m in syncbn.convert_sync_batchnorm(net)] == types


def test_a_scripted_model_is_left_with_a_warning():
    """torch.nn.SyncBatchNorm's converter leaves it silently."""
    net = torch.jit.script(nn.Sequential(nn.BatchNorm2d(4)))
    with pytest.warns(UserWarning, match=r"torch.jit._script.RecursiveScriptModule: 0\n"):
        assert syncbn.convert_sync_batchnorm(net) is net
    assert net(torch.randn(2, 4, 3, 3)).shape == (2, 4, 3, 3)


def test_a_traced_graph_is_converted():
    """Batch norm is a call of a module there."""
    net = torch.fx.symbolic_trace(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)))
    syncbn.convert_sync_batchnorm(net)
    net(torch.randn(2, 3, 3, 3))
    assert syncbn.report(net)[0].count == 18


def test_a_lazy_layer_is_refused_until_it_has_seen_an_input():
    """torch.nn.SyncBatchNorm's converter makes of it a layer of 0 channels, whose first call
    fails. Left as it is it would silently become a plain layer."""
    net = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(nn.LazyBatchNorm2d()))
    refused(net, r"^module: got 1\.0, a LazyBatchNorm2d that has not seen an input, expected")
    net(torch.randn(2, 3, 4, 4))
    syncbn.convert_sync_batchnorm(net)
    assert type(net[1][0]) is syncbn.SyncBatchNorm and net[1][0].num_features == 3
    assert net[1][0].weight.shape == (3,)


@pytest.mark.parametrize("called", (False, True), ids=("new", "called before"))
def test_a_compiled_model_is_converted_exact(called):
    """As torch.nn.SyncBatchNorm's converter does. Graphs are guarded by the classes of layers."""
    x = torch.randn(4, 4, 3, 3)
    expected = syncbn.convert_sync_batchnorm(nn.BatchNorm2d(4))(x)
    inner = nn.Sequential(nn.BatchNorm2d(4))
    inner.compile(backend="eager")
    for net in (torch.compile(nn.Sequential(nn.BatchNorm2d(4)), backend="eager"), inner):
        if called:
            net(x)
        layer = next(m for m in net.modules() if isinstance(m, nn.BatchNorm2d))
        assert syncbn.convert_sync_batchnorm(net) is net
        assert type(layer) is syncbn.SyncBatchNorm and torch.equal(net(x), expected)
        assert syncbn.report(net)[0].count == 36
        syncbn.revert_sync_batchnorm(net)
        assert type(layer) is nn.BatchNorm2d and net(x).shape == x.shape


@pytest.fixture
def one_rank(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_sharded_model_is_refused(one_rank):
    """fully_shard gives a layer a class of its own."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.fsdp.fully_shard(net[1], mesh=mesh)
    refused(net, "^module: got 1, sharded by FSDP already, expected .* then FSDP$")
    wrapped = torch.distributed.fsdp.FullyShardedDataParallel(
        nn.Sequential(nn.BatchNorm2d(4)), device_id=torch.device("cpu"), use_orig_params=True
    )
    refused(wrapped, "a model, sharded by FSDP already")
    sharded = torch.distributed.fsdp.fully_shard(nn.Sequential(nn.Linear(4, 4)), mesh=mesh)
    net = syncbn.convert_sync_batchnorm(nn.Sequential(sharded, nn.BatchNorm1d(4)))
    assert type(net[1]) is syncbn.SyncBatchNorm  # what is not inside may change
    torch.distributed.fsdp.fully_shard(net[1], mesh=mesh)
    with pytest.raises(ValueError, match="^module: got 1, sharded by FSDP, expected it before"):
        syncbn.revert_sync_batchnorm(net)
    assert isinstance(net[1], syncbn.SyncBatchNorm)


def test_a_model_under_replicate_is_converted(one_rank):
    """It is DistributedDataParallel by another name."""
    net = torch.distributed._composable.replicate(nn.Sequential(nn.BatchNorm2d(4)))
    weight = net[0].weight
    syncbn.convert_sync_batchnorm(net)
    net(torch.randn(2, 4, 3, 3)).sum().backward()
    assert isinstance(net[0], syncbn.SyncBatchNorm) and net[0].weight is weight


@pytest.mark.parametrize(
    "call",
    (
        syncbn.convert_sync_batchnorm,
        syncbn.revert_sync_batchnorm,
        syncbn.report,
        syncbn.set_group,
        syncbn.prepare,
        syncbn.reset_groups,
        syncbn.skip,
    ),
)
def test_something_that_is_no_module_is_refused(call):
    """PyTorch's converter: AttributeError, a list has no named_children."""
    with pytest.raises(ValueError, match="^module: got list, expected a torch.nn.Module$"):
        call([nn.BatchNorm2d(4)])


def test_a_registered_subclass_exact():
    """The subclass keeps its activation; state_dict and round trip as for plain layers."""
    syncbn.register_conversion(BatchNormSilu, lambda layer, sync: sync(layer, SyncBatchNormSilu))
    net = nn.Sequential(BatchNormSilu(4), nn.BatchNorm2d(4))
    reference = copy.deepcopy(net)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        syncbn.convert_sync_batchnorm(net, statistics="welford")
    assert type(net[0]) is SyncBatchNormSilu and net[0].statistics == "welford"
    assert net[0].state.name == "0" and list(net.state_dict()) == list(reference.state_dict())
    x = torch.randn(6, 4, 5, 5)
    # y is relative to 1; a few roundings each in PyTorch's sums of 150 terms.
    torch.testing.assert_close(net[0](x), reference[0](x), rtol=0, atol=150 * 2**-23)
    net.load_state_dict(reference.state_dict())
    assert torch.equal(net.eval()(x), reference.eval()(x))
    syncbn.revert_sync_batchnorm(net)
    assert [type(m) for m in net] == [BatchNormSilu, nn.BatchNorm2d]
    assert set(vars(net[0])) == set(vars(reference[0]))
    assert torch.equal(net(x), reference(x))


def test_a_subclass_is_one_call_for_a_tracer_exact():
    """Recorded inside, the layer's own forward would be the subclass's: its activation twice."""
    syncbn.register_conversion(BatchNormSilu, lambda layer, sync: sync(layer, SyncBatchNormSilu))
    net = syncbn.convert_sync_batchnorm(nn.Sequential(BatchNormSilu(4)))
    x = torch.randn(2, 4, 3, 3)
    traced = torch.fx.symbolic_trace(net)
    assert torch.equal(traced(x), net(x))
    assert [n.op for n in traced.graph.nodes] == ["placeholder", "call_module", "output"]


def test_a_registered_fusion_and_its_fold_exact():
    """sync(activation=) fuses what the class does; reverting gives it back, also within fold."""

    class BatchNormLeaky(BatchNormSilu):
        def __init__(self, channels):
            super().__init__(channels)
            self.act = nn.LeakyReLU(0.5)

    def make(layer, sync):
        return sync(layer, activation="leaky_relu", negative_slope=layer.act.negative_slope)

    syncbn.register_conversion(BatchNormLeaky, make)
    net = nn.Sequential(nn.ReLU(), BatchNormLeaky(4)).eval()  # a ReLU: nothing to fold into
    x = torch.randn(2, 4, 3, 3)
    expected = net(x)
    syncbn.convert_sync_batchnorm(net)
    assert type(net[1]) is syncbn.SyncBatchNorm and torch.equal(net(x), expected)
    with pytest.warns(UserWarning, match="were not folded"):
        folded = syncbn.fold(net)
    assert type(folded[1]) is BatchNormLeaky and torch.equal(folded(x), expected)
    other = copy.deepcopy(net)
    other[1].activation = "relu"
    with pytest.raises(ValueError, match=r"^1: got a layer with activation 'relu', which a BatchN"):
        syncbn.revert_sync_batchnorm(other)
    with pytest.warns(UserWarning, match="were not folded"):
        assert torch.equal(syncbn.fold(other)(x), other(x))
    assert torch.equal(syncbn.revert_sync_batchnorm(net)(x), expected)
    assert type(net[1]) is BatchNormLeaky


def test_a_registered_replacement_and_its_inverse_exact():
    """A class that is not derived from batch norm: another object takes its place."""

    def make(layer, sync):
        plain = nn.BatchNorm2d(4)
        for name in ("weight", "bias"):
            getattr(plain, name).data = getattr(layer, name)
        plain.running_mean, plain.running_var = layer.running_mean, layer.running_var
        return sync(plain.eval())

    def revert(layer):
        result = FrozenBatchNorm(4)
        for name in ("weight", "bias", "running_mean", "running_var"):
            setattr(result, name, getattr(layer, name).detach())
        return result

    syncbn.register_conversion(FrozenBatchNorm, make, revert)
    frozen = FrozenBatchNorm(4)
    net = nn.ModuleDict({"a": nn.Sequential(frozen), "b": frozen})
    frozen.running_var.fill_(3)
    syncbn.convert_sync_batchnorm(net)
    assert type(net["b"]) is syncbn.SyncBatchNorm and net["a"][0] is net["b"]
    assert net["b"].running_var is frozen.running_var and net["b"].state.name == "a.0"
    syncbn.revert_sync_batchnorm(net)
    assert type(net["b"]) is FrozenBatchNorm and net["a"][0] is net["b"]
    assert torch.equal(net["b"].running_var, frozen.running_var)


def test_a_class_registered_to_be_left():
    syncbn.register_conversion(FrozenBatchNorm, lambda layer, sync: layer)
    net = nn.Sequential(FrozenBatchNorm(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert type(syncbn.convert_sync_batchnorm(net)[0]) is FrozenBatchNorm


@pytest.mark.parametrize(
    "make, text",
    (
        (lambda layer, sync: 1 / 0, "division by zero"),
        (lambda layer, sync: None, "^register_conversion: got None from make for BatchNormSilu"),
        (lambda layer, sync: sync(layer, activation="gelu"), "^activation: got 'gelu', expected"),
        (lambda layer, sync: sync(layer, slope=1), "^slope: got an option of that name, expected"),
        (lambda layer, sync: sync(layer, nn.SyncBatchNorm), "^cls: got .*SyncBatchNorm'>, expect"),
        (lambda layer, sync: sync(layer.act), "^layer: got torch.nn.*SiLU for 1.1, expected"),
    ),
)
def test_an_error_of_a_registered_conversion_undoes_everything(make, text):
    syncbn.register_conversion(BatchNormSilu, make)
    net = nn.Sequential(nn.BatchNorm2d(4), nn.Sequential(nn.Identity(), BatchNormSilu(4)))
    refused(net, text, (ValueError, ZeroDivisionError))


def test_an_error_of_a_registered_inverse_undoes_everything():
    def make(layer, sync):
        return sync(nn.BatchNorm2d(4))

    syncbn.register_conversion(BatchNormSilu, make, lambda layer: 1 / 0)
    net = syncbn.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(4), BatchNormSilu(4)))
    before = state_of(net)
    with pytest.raises(ZeroDivisionError):
        syncbn.revert_sync_batchnorm(net)
    assert state_of(net) == before


def test_registering_nonsense_is_refused():
    for arguments, text in (
        ((nn.BatchNorm2d(4), print), "^cls: got BatchNorm2d"),
        ((int, print), "^cls: got <class 'int'>, expected a subclass of torch.nn.Module"),
        ((syncbn.SyncBatchNorm, print), "^cls: got SyncBatchNorm, which is synchronized already"),
        ((OwnBatchNorm, "make"), "^make: got 'make', expected a function"),
        ((OwnBatchNorm, print, 1), "^revert: got 1, expected a function"),
    ):
        with pytest.raises(ValueError, match=text):
            syncbn.register_conversion(*arguments)
    assert OwnBatchNorm not in registered


def test_conversion_keeps_nothing_alive():
    net = nn.Sequential(nn.BatchNorm2d(4))
    alive = weakref.ref(net)
    syncbn.revert_sync_batchnorm(syncbn.convert_sync_batchnorm(net))
    del net
    gc.collect()
    assert alive() is None
