"""From one graph of a model to one graph with a training and an inference branch."""

import inspect
from collections.abc import Callable

from torch import fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from ._graph_layer import VARIABLES, BatchNorm
from .ops import batch_norm_

BRANCHES = ("train", "infer")
# Modules of torch.nn that compute something else in training than in evaluation.
_MODAL = (BatchNorm, _DropoutNd, _NormBase, nn.RReLU, nn.RNNBase, nn.MultiheadAttention)


def _in_mode(module: nn.Module, training: bool) -> nn.Module:
    """A stand-in in that mode with the same parameters and buffers; the module keeps its own."""
    result = type(module).__new__(type(module))
    children = {
        name: None if child is None else _in_mode(child, training)
        for name, child in module._modules.items()
    }
    result.__dict__.update({**module.__dict__, "training": training, "_modules": children})
    return result


def _training_argument(node: fx.Node) -> inspect.Signature | None:
    """The signature of a function that takes `training`, as torch.nn.functional.dropout does."""
    if node.op != "call_function":
        return None
    try:
        signature = inspect.signature(node.target)
    except (TypeError, ValueError):
        return None
    return signature if "training" in signature.parameters else None


class Fork:
    """The graph with both branches.

    Args:
        source: the graph of the model, in which a BatchNorm is one call_module node.
        module: the model, which get_attr nodes refer to.
        layer_at: the module that a call_module node means, by its target.
        loss: function or module (output, target) -> loss, the training branch's last node; or None.
    """

    def __init__(
        self,
        source: fx.Graph,
        module: nn.Module,
        layer_at: Callable[[str], nn.Module],
        loss: Callable | None,
    ) -> None:
        self.graph = fx.Graph()
        #: what the nodes refer to
        self.root = nn.Module()
        for name in ("operations", "variables"):
            self.root.add_module(name, nn.Module())
        self.root.add_module("module", module)
        #: the nodes that a branch returns
        self.results = {}
        self._layer_at = layer_at
        self._variables: dict[fx.Node, list[fx.Node | None]] = {}
        self._plans: dict[str, fx.Graph] = {}
        self._fork(source)
        if loss is not None:
            self._add_loss(loss)
        self.graph.output(self.results)
        self.graph.lint()

    def _fork(self, source: fx.Graph) -> None:
        copies: dict[str, dict[fx.Node, fx.Node]] = {branch: {} for branch in BRANCHES}
        forked: set[fx.Node] = set()
        for node in source.nodes:
            if node.op == "output":
                self.results = {
                    branch: fx.map_arg(node.args[0], copies[branch].__getitem__)
                    for branch in BRANCHES
                }
            elif forked.isdisjoint(node.all_input_nodes) and not self._depends_on_mode(node):
                common = self._copy(node, copies["train"], None)
                for branch in BRANCHES:
                    copies[branch][node] = common
            else:
                forked.add(node)
                for branch in BRANCHES:
                    copies[branch][node] = self._copy(node, copies[branch], branch)

    def _depends_on_mode(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return any(isinstance(m, _MODAL) for m in self._layer_at(node.target).modules())
        return _training_argument(node) is not None

    def _add(self, branch: str | None, op: str, target, args: tuple, kwargs: dict, name: str):
        """A new node of the graph; branch None is what the branches have in common."""
        node = self.graph.create_node(op, target, args, kwargs, name=name)
        node.meta["branch"] = branch
        return node

    def _add_module(self, branch: str | None, module, args: tuple, kwargs: dict, name: str):
        node = self._add(branch, "call_module", "", args, kwargs, name)
        self.root.operations.add_module(node.name, module)
        node.target = f"operations.{node.name}"
        return node

    def _add_loss(self, loss: Callable) -> None:
        if any(n.op == "placeholder" and n.target == "target" for n in self.graph.nodes):
            raise ValueError(
                "loss: got one for a network with an input named 'target', expected another name; "
                "'target' is the loss's second argument"
            )
        target = self._add("train", "placeholder", "target", (), {}, "target")
        args = (self.results["train"], target)
        if isinstance(loss, nn.Module):
            self.results["train"] = self._add_module("train", loss, args, {}, "loss")
        else:
            self.results["train"] = self._add("train", "call_function", loss, args, {}, "loss")

    def _copy(self, node: fx.Node, copies: dict, branch: str | None) -> fx.Node:
        """A node of the source graph in one branch."""
        args = fx.map_arg(node.args, copies.__getitem__)
        kwargs = fx.map_arg(node.kwargs, copies.__getitem__)
        name = node.name if branch is None else f"{node.name}_{branch}"
        target = node.target
        signature = _training_argument(node)
        if signature is not None:
            bound = signature.bind(*args, **kwargs)
            bound.arguments["training"] = branch == "train"
            args, kwargs = bound.args, bound.kwargs
        elif node.op == "get_attr":
            target = f"module.{target}"
        elif node.op == "call_module":
            module = self._layer_at(target)
            if isinstance(module, BatchNorm):
                inputs = (*args, *kwargs.values())
                if len(inputs) != 1:
                    raise ValueError(
                        f"{node.target}: got {len(inputs)} arguments, expected x alone"
                    )
                return self._operator(node, module, inputs[0], branch)
            if branch is not None:
                module = _in_mode(module, branch == "train")
            return self._add_module(branch, module, args, kwargs, name)
        return self._add(branch, node.op, target, args, kwargs, name)

    def _operator(self, node: fx.Node, layer: BatchNorm, x: fx.Node, branch: str) -> fx.Node:
        """One branch's operator of a layer, on variables that both branches' operators share."""
        if node not in self._variables:
            self.root.variables.add_module(node.name, layer)
            self._variables[node] = [
                None
                if getattr(layer, variable) is None
                else self._add(
                    None,
                    "get_attr",
                    f"variables.{node.name}.{variable}",
                    (),
                    {},
                    f"{node.name}_{variable}",
                )
                for variable in VARIABLES
            ]
        args = (x, *self._variables[node])
        attributes = layer.operator_attributes(branch == "infer", node.target)
        name = f"{node.name}_{branch}"
        made = self._add(branch, "call_function", batch_norm_, args, attributes, name)
        return self._add(branch, "call_function", getattr, (made, "y"), {}, f"{name}_y")

    def plan(self, target: str) -> fx.Graph:
        """The part of the graph that a target ("train", "infer" or a node's name) depends on."""
        if target in self._plans:
            return self._plans[target]
        results = {node.name: node for node in self.graph.nodes if node.op != "output"}
        results.update(self.results)
        if target not in results:
            raise ValueError(f"target: got {target!r}, expected 'train', 'infer' or a node's name")
        needed: set[fx.Node] = set()
        pending: list[fx.Node] = []
        fx.map_arg(results[target], pending.append)
        while pending:
            node = pending.pop()
            if node not in needed:
                needed.add(node)
                pending.extend(node.all_input_nodes)
        plan, copies = fx.Graph(), {}
        for node in self.graph.nodes:
            if node in needed:
                copies[node] = plan.node_copy(node, copies.__getitem__)
        plan.output(fx.map_arg(results[target], copies.__getitem__))
        self._plans[target] = plan
        return plan

    def __str__(self) -> str:
        """The nodes: what is common to both branches, then each branch."""
        lines = []
        for branch in (None, *BRANCHES):
            lines.append("common:" if branch is None else f"{branch}:")
            nodes = (n for n in self.graph.nodes if n.op not in ("get_attr", "output"))
            lines += [f"  {self._line(n)}" for n in nodes if n.meta["branch"] == branch]
            if branch is not None:
                lines.append(f"  return {self.results[branch]}")
        return "\n".join(lines)

    def _line(self, node: fx.Node) -> str:
        def show(value) -> str:
            is_variable = isinstance(value, fx.Node) and value.op == "get_attr"
            return value.target.split(".", 1)[1] if is_variable else repr(value)

        args = [show(a) for a in node.args]
        if node.op == "placeholder":
            return f"{node.name} = input"
        if node.target is getattr:
            return f"{node.name} = {args[0]}.{node.args[1]}"
        if node.op == "call_module":
            called = type(self.root.get_submodule(node.target)).__name__
        elif node.op == "call_method":
            called = f"{args.pop(0)}.{node.target}"
        else:
            called = getattr(node.target, "__name__", type(node.target).__name__)
        # The layer's name is the node's.
        kwargs = {k: v for k, v in node.kwargs.items() if k != "layer_name" and v is not None}
        args += [f"{k}={show(v)}" for k, v in kwargs.items()]
        return f"{node.name} = {called}({', '.join(args)})"
