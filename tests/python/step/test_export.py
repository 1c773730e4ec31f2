# SPDX-License-Identifier: Apache-2.0
"""Exporters and graph tools on a converted model: in evaluation mode it is the unconverted one to
them, node by node.

torch.nn.SyncBatchNorm in evaluation mode is too, but for torch.jit.script, which fails inside its
forward. In training it refuses CPU tensors."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

import syncbn
from support import assert_same_layers, assert_same_step
from syncbn.operators import ops


def plain_net() -> nn.Module:
    """Batch norms after a convolution and after an activation, with estimates of their own."""
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.BatchNorm2d(6), nn.Conv2d(6, 2, 1)
    )
    for layer in (model[1], model[3]):
        nn.init.normal_(layer.running_mean)
        nn.init.uniform_(layer.running_var, 0.5, 2)
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    return model


def nets() -> tuple[nn.Module, nn.Module]:
    """The model converted, and as it was."""
    return syncbn.convert_sync_batchnorm(plain_net()), plain_net()


def samples(count: int = 4, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 3, 7, 7, generator=torch.Generator().manual_seed(seed))


def whole_nodes(program: torch.export.ExportedProgram) -> list[tuple]:
    """Every node with its arguments, in which other nodes are their names."""
    return [(n.op, n.name, str(n.target), str(n.args), str(n.kwargs)) for n in program.graph.nodes]


@pytest.mark.parametrize(
    "momentum, affine, track",
    ((0.1, True, True), (0.03, True, True), (None, True, True), (1.0, False, True))
    + ((0.03, True, False), (None, False, False)),
)
def test_exported_nodes_have_the_arguments_of_plain_batch_norm(momentum, affine, track):
    """Also what evaluation does not use: momentum. Whoever trains the graph further needs it."""
    options = {"momentum": momentum, "affine": affine, "track_running_stats": track, "eps": 1e-3}
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(2, 3, 4, 4, dtype=dtype)
        made = (
            nn.BatchNorm2d(3, **options, dtype=dtype),
            syncbn.convert_sync_batchnorm(nn.BatchNorm2d(3, **options, dtype=dtype)),
            syncbn.SyncBatchNorm(3, **options, dtype=dtype),
        )
        plain, *ours = (torch.export.export(layer.eval(), (x,)) for layer in made)
        for program in ours:
            assert whole_nodes(program) == whole_nodes(plain)


def onnx_of(net, x, dynamo, **options):
    """options: of the exporter that is not dynamo's."""
    if dynamo:
        return torch.onnx.export(net, (x,), dynamo=True, verbose=False).model_proto
    file = io.BytesIO()
    torch.onnx.export(net, (x,), file, dynamo=False, **options)
    return pytest.importorskip("onnx").load_from_string(file.getvalue())


@pytest.mark.parametrize("dynamo", (True, False), ids=("dynamo", "TorchScript"))
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_onnx_nodes_and_values(dynamo):
    pytest.importorskip("onnxscript")
    from onnx.reference import ReferenceEvaluator

    # Nothing before the layer that exporters would merge it with, and nothing else that rounds.
    x = samples()
    ours, plain = (nn.Sequential(nn.ReLU(), net[3]).eval() for net in nets())
    x = torch.cat([x, x], dim=1)
    # Which torch.export has for dynamo, see above.
    for momentum in (0.03,) if dynamo else (0.03, None, 1.0):
        ours[1].momentum = plain[1].momentum = momentum
        model, other = (onnx_of(net, x, dynamo) for net in (ours, plain))
        for graph in (model.graph, other.graph):
            assert [n.op_type for n in graph.node] == ["Relu", "BatchNormalization"]
        assert list(model.graph.node[1].attribute) == list(other.graph.node[1].attribute)
    (got,) = ReferenceEvaluator(model).run(None, {model.graph.input[0].name: x.numpy()})
    # Both form s x - s m + b, s = w / sqrt(v + eps), in float32, in some order: at most 8 roundings
    # of each term, so 2 gamma(8) (s (|x| + |m|) + |b|) between them.
    layer, u = ours[1], 2.0**-24
    w, b, m, v = (
        t.detach().double()[:, None, None]
        for t in (layer.weight, layer.bias, layer.running_mean, layer.running_var)
    )
    size = (w.abs() / (v + layer.eps).sqrt()) * (x.relu().double() + m.abs()) + b.abs()
    bound = 2 * (8 * u / (1 - 8 * u)) * size
    assert ((torch.from_numpy(got).double() - ours(x).double()).abs() <= bound).all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_jit_trace_of_evaluation_is_plain_batch_norm_exact():
    x = samples()
    ours, plain = (torch.jit.trace(net.eval(), x) for net in nets())
    kinds = [[node.kind() for node in net.inlined_graph.nodes()] for net in (ours, plain)]
    assert kinds[0] == kinds[1] and kinds[0].count("aten::batch_norm") == 2
    file = io.BytesIO()
    torch.jit.save(ours, file)
    file.seek(0)
    assert torch.equal(torch.jit.load(file)(x), plain(x))


TRAINED = (
    {},
    {"momentum": None},
    {"momentum": 0.03, "affine": False},
    {"track_running_stats": False},
    {"eps": 1e-2, "dtype": torch.float64},
)
#: What only the layer has, and leaves no mark in a trace.
OWN = ({}, {"statistics": "welford"}, {"affine_grad": "global", "sync": False})


def kinds_of(traced) -> list[str]:
    return [node.kind() for node in traced.inlined_graph.nodes()]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("options", TRAINED, ids=str)
def test_jit_trace_of_training_on_one_rank_is_plain_batch_norm_exact(options):
    """The trace trains as that of nn.BatchNorm2d does: output, gradients, running statistics."""
    dtype = options.get("dtype", torch.float32)
    x = torch.cat([samples(), samples()], dim=1).to(dtype)
    for own in OWN:
        ours, plain = syncbn.SyncBatchNorm(6, **options, **own), nn.BatchNorm2d(6, **options)
        # The check runs the layer itself once, which has the bits of its own operators.
        traces = [torch.jit.trace(layer, x, check_trace=False) for layer in (ours, plain)]
        assert kinds_of(traces[0]) == kinds_of(traces[1])
        assert "aten::batch_norm" in kinds_of(traces[0])
        assert torch.equal(*(trace(x * 3) for trace in traces))
        for trace in traces:
            z = x.flip(0).requires_grad_()
            trace(z).square().sum().backward()
        for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
        for a, b in zip(ours.buffers(), plain.buffers(), strict=True):
            assert torch.equal(a, b)
        torch.jit.save(traces[0], io.BytesIO())
        if options.get("momentum", 0.1) is not None:  # without it plain fails the check, too
            torch.jit.trace(ours, x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("dynamo", (True, False), ids=("dynamo", "TorchScript"))
def test_onnx_of_training_on_one_rank_is_that_of_plain_batch_norm(dynamo):
    pytest.importorskip("onnxscript")

    def nodes(net):
        model = onnx_of(net, samples(), dynamo, training=torch.onnx.TrainingMode.TRAINING)
        return [(n.op_type, list(n.attribute)) for n in model.graph.node]

    ours, plain = nets()
    ours[1].activation = "relu"
    ours[2] = nn.Identity()
    got = nodes(ours)
    assert got == nodes(plain)
    assert ours.training and "BatchNormalization" in str(got)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_jit_script_is_refused_and_changes_nothing():
    """torch.nn.SyncBatchNorm: "attribute lookup is not defined on python value", in torch.*."""
    ours, plain = nets()
    with pytest.raises(RuntimeError, match=r"^1: torch\.jit\.script .* expected torch\.jit\.trace"):
        torch.jit.script(ours.eval())
    assert [type(m) for m in ours].count(syncbn.SyncBatchNorm) == 2
    script = torch.jit.script(syncbn.revert_sync_batchnorm(copy.deepcopy(ours)))
    assert torch.equal(script(samples()), plain.eval()(samples()))


@pytest.mark.parametrize("strict", (False, True), ids=("", "strict"))
def test_exported_training_step_trains_exact(strict):
    """With its gradient: torch.export keeps of an autograd function its forward alone."""
    model, reference = (syncbn.convert_sync_batchnorm(plain_net()) for _ in range(2))
    shapes = ({0: torch.export.Dim("n")},)
    program = torch.export.export(model, (samples(),), dynamic_shapes=shapes, strict=strict)
    steps = [n for n in program.graph.nodes if n.target == ops.training_step.default]
    assert len(steps) == 2
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    trained = torch.export.load(file).module()
    for count in (4, 2, 7):
        assert_same_step(trained, reference, samples(count, seed=count))
    if strict:
        return
    compiled = torch.compile(trained, backend="aot_eager", fullgraph=True)
    assert_same_step(compiled, reference, samples(5))


def test_exported_operators_meet_their_contract():
    """Fakes, aliasing and autograd registration, by PyTorch's own checks."""
    x = torch.randn(4, 5, 6, requires_grad=True)
    weight, bias = (torch.randn(5, requires_grad=True) for _ in range(2))
    constants = (None, "name", None, 300.0, "auto", True, True, 1e-5, "share")
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    for residual, mask, mode in (
        (None, None, ("none", 0.01, "reproducible")),
        (None, torch.rand(4, 6) > 0.3, ("none", 0.01, "reproducible")),
        (torch.randn(4, 5, 6, requires_grad=True), None, ("relu", 0.01, "welford")),
    ):
        torch.library.opcheck(
            ops.training_step.default,
            (x, weight, bias, residual, mask, 0x1000001, *constants, *mode),
            test_utils=tests,
        )
        with torch.no_grad():
            y, saved, activation_mask, backward = ops.training_step(
                x, weight, bias, residual, mask, 0x1000001, *constants, *mode
            )
        for needs in ([True] * 3 + [residual is not None], [True, False, True, False]):
            torch.library.opcheck(
                ops.training_step_backward.default,
                (y, x.detach(), weight.detach(), bias.detach(), saved)
                + (activation_mask, mask, backward, torch.float32, needs, *constants, *mode),
                test_utils=tests,
            )


# The compiler instantiates autograd functions, and is warned by PyTorch.
@pytest.mark.filterwarnings("error", "ignore:.*should not be instantiated:DeprecationWarning")
def test_a_network_is_one_graph_without_warnings():
    explained = torch._dynamo.explain(nets()[0])(samples())
    assert explained.graph_break_count == 0 and explained.graph_count == 1


def test_torchvision_feature_extraction_exact():
    extraction = pytest.importorskip("torchvision.models.feature_extraction")
    from torchvision.models import resnet18

    def net(convert):
        torch.manual_seed(2)
        model = resnet18(num_classes=4)
        return syncbn.convert_sync_batchnorm(model) if convert else model

    ours, plain, reference = net(True), net(False), net(True)
    names = extraction.get_graph_node_names
    assert names(ours) == names(plain)
    nodes = {"train_return_nodes": ["bn1", "layer2.0.bn2"], "eval_return_nodes": ["layer3"]}
    ours, plain = (extraction.create_feature_extractor(m, **nodes) for m in (ours, plain))
    x = torch.randn(2, 3, 32, 32)
    seen = []
    for layer in (reference.bn1, reference.layer2[0].bn2):
        layer.register_forward_hook(lambda *args: seen.append(args[2].clone()))
    reference(x)
    # Training runs what the nodes need; bn2 is followed by operations in place.
    got = ours.train()(x)
    assert list(got) == nodes["train_return_nodes"]
    assert torch.equal(got["layer2.0.bn2"], seen[1])
    assert torch.equal(
        ours.get_buffer("layer2.0.bn2.running_var"), reference.layer2[0].bn2.running_var
    )
    ours.load_state_dict(plain.state_dict(), strict=False)
    assert torch.equal(ours.eval()(x)["layer3"], plain.eval()(x)["layer3"])


def _packaged(model):
    file = io.BytesIO()
    with torch.package.PackageExporter(file) as exporter:
        exporter.extern(["torch.**", "syncbn.**"])
        exporter.save_pickle("model", "model.pkl", model)
    file.seek(0)
    return torch.package.PackageImporter(file).load_pickle("model", "model.pkl")


def _saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "form", (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), _saved, _packaged),
    ids=("deepcopy", "pickle", "torch.save", "torch.package"),
)  # fmt: skip
def test_copies_of_used_models_train_exact(form):
    """Of a model, and of one that was compiled in place or around."""
    plain, inside, around = (syncbn.convert_sync_batchnorm(plain_net()) for _ in range(3))
    inside.compile(backend="aot_eager")
    for model in (plain, inside, around):
        model(samples()).sum().backward()
        model.zero_grad()
    copies = [form(model) for model in (plain, inside)]
    if form is not _packaged:  # torch.package refuses what torch.compile returns, of any model
        copies.append(form(torch.compile(around, backend="aot_eager"))._orig_mod)
    plain(samples(5)).square().sum().backward()
    for other in copies:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            other(samples(5)).square().sum().backward()
        assert_same_layers(other, plain)
