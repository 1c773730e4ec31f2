# SPDX-License-Identifier: Apache-2.0
"""From one graph of a model to one graph with a training and an inference branch; and which nodes
of a graph write in place, and which other nodes may see that."""

import inspect
import operator
from collections.abc import Callable, Iterable
from typing import Any

from torch import fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd

from ..ops import batch_norm, batch_norm_
from .layer import VARIABLES, BatchNorm

BRANCHES = ("train", "infer")
# Modules of torch.nn that compute something else in training than in evaluation.
_MODAL = (BatchNorm, _DropoutNd, _NormBase, nn.RReLU, nn.RNNBase, nn.MultiheadAttention)
# Their results are new memory, and batch_norm's. Of all else a result may be a view of the inputs.
_NEW = (_ConvNd, _NormBase, nn.Linear, BatchNorm)
_WRITERS = (
    *("setitem", "delitem", "iadd", "iand", "iconcat", "ifloordiv", "ilshift", "imatmul", "imod"),
    *("imul", "ior", "ipow", "irshift", "isub", "itruediv", "ixor"),
)
_FUNCTIONS = {getattr(operator, name) for name in _WRITERS}
_METHODS = {f"__{name}__" for name in _WRITERS}


def _signature(function: Callable | str) -> inspect.Signature | None:
    """Gives its signature, which most of what is written in C++ does not have."""
    try:
        return None if isinstance(function, str) else inspect.signature(function)
    except (TypeError, ValueError):
        return None


def _is_in_place_name(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


class Memory:
    """Nodes that may share memory, found without running them: rather too many than too few.

    Args:
        nodes: of a graph, in its order.
        module_at: the module that a call_module node means, by its target.
    """

    def __init__(self, nodes: Iterable[fx.Node], module_at: Callable[[str], nn.Module]) -> None:
        self._module_at = module_at
        nodes = [node for node in nodes if node.op != "output"]
        #: nodes that write to one of their inputs, or raise if it is not as they assert
        self.writers = [node for node in nodes if self._writes(node)]
        #: of each node, all that may share memory with it: one set for all of them
        self._members = {node: {node} for node in nodes}
        attributes: dict[str, fx.Node] = {}
        for node in nodes:
            if node.op == "get_attr":
                self._join(node, attributes.setdefault(str(node.target), node))
            elif not self._makes_new_memory(node):
                for source in node.all_input_nodes:
                    self._join(node, source)

    def seen_by(self, writer: fx.Node) -> set[fx.Node]:
        """Gives the nodes whose value may not be the same after a writer ran."""
        members = self._members[writer]
        # Modules read parameters and buffers without a node that says so.
        return set(self._members) if any(n.op == "get_attr" for n in members) else members

    def _join(self, a: fx.Node, b: fx.Node) -> None:
        fewer, more = sorted((self._members[a], self._members[b]), key=len)
        if fewer is not more:
            more |= fewer
            self._members.update(dict.fromkeys(fewer, more))

    def _makes_new_memory(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return isinstance(self._module_at(str(node.target)), _NEW)
        return node.op == "call_function" and node.target in (batch_norm, batch_norm_)

    def _writes(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            module = self._module_at(str(node.target))
            return any(getattr(m, "inplace", False) for m in module.modules())
        if node.op == "call_method":
            name = str(node.target)
            return _is_in_place_name(name) or name in _METHODS or "out" in node.kwargs
        # A layer's update of its variables is its own: a layer that nobody needs does not run.
        if node.op != "call_function" or node.target is batch_norm_:
            return False
        if (
            node.target in _FUNCTIONS
            or _is_in_place_name(getattr(node.target, "__name__", ""))
            or node.kwargs.get("out") is not None
            or node.is_impure(impure_random=False)
        ):
            return True
        signature = _signature(node.target)
        if signature is None or "inplace" not in signature.parameters:
            return False
        bound = signature.bind(*node.args, **node.kwargs)
        return bool(bound.arguments.get("inplace", False))


class Run(fx.Interpreter):
    """Runs a part of a forked graph. Modules of a branch run in its mode, and keep their own."""

    def run_node(self, n: fx.Node) -> Any:
        branch = n.meta.get("branch")
        if n.op != "call_module" or branch is None:
            return super().run_node(n)
        before = {m: m.training for m in self.fetch_attr(str(n.target)).modules()}
        try:
            for module in before:
                module.training = branch == "train"
            return super().run_node(n)
        finally:
            for module, training in before.items():
                module.training = training


def _mode_argument(node: fx.Node) -> str | None:
    """Gives the argument that tells a function its mode: `training`, as torch.nn.functional.dropout
    has, or `is_infer`."""
    if node.op != "call_function":
        return None
    if node.target in (batch_norm, batch_norm_):
        return "is_infer"
    signature = _signature(node.target)
    return "training" if signature is not None and "training" in signature.parameters else None


def _with_mode(
    function: Callable | str, argument: str, training: bool, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """Gives args and kwargs of a call in that mode."""
    signature = _signature(function)
    assert signature is not None  # it has the argument
    bound = signature.bind(*args, **kwargs)
    bound.arguments[argument] = training != (argument == "is_infer")
    return bound.args, bound.kwargs


def _with_inputs(nodes: list[fx.Node]) -> set[fx.Node]:
    """Gives the nodes and all that their values are computed from."""
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending.extend(node.all_input_nodes)
    return found


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
        self.results: dict[str, Any] = {}
        self._layer_at = layer_at
        self._variables: dict[fx.Node, list[fx.Node | None]] = {}
        self._plans: dict[str, fx.Graph] = {}
        self._memories: dict[str | None, Memory] = {}
        self._fork(source)
        if loss is not None:
            self._add_loss(loss)
        self.graph.output(self.results)
        self.graph.lint()

    def _fork(self, source: fx.Graph) -> None:
        copies: dict[str, dict[fx.Node, fx.Node]] = {branch: {} for branch in BRANCHES}
        forked: set[fx.Node] = set()
        memory = Memory(source.nodes, self._layer_at)
        writers = set(memory.writers)
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
                if node in writers:  # what is read from here on is the branch's
                    forked |= memory.seen_by(node)

    def _depends_on_mode(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return any(isinstance(m, _MODAL) for m in self._layer_at(str(node.target)).modules())
        return _mode_argument(node) is not None

    def _add(
        self, branch: str | None, op: str, target: Any, args: Any, kwargs: Any, name: str
    ) -> fx.Node:
        """Adds a new node to the graph; branch None is what the branches have in common."""
        node = self.graph.create_node(op, target, args, kwargs, name=name)
        node.meta["branch"] = branch
        return node

    def _add_module(
        self, branch: str | None, module: nn.Module, args: Any, kwargs: Any, name: str
    ) -> fx.Node:
        node = self._add(branch, "call_module", "", args, kwargs, name)
        self.root.get_submodule("operations").add_module(node.name, module)
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
        """Copies a node of the source graph into one branch."""
        args = fx.map_arg(node.args, copies.__getitem__)
        kwargs = fx.map_arg(node.kwargs, copies.__getitem__)
        name = node.name if branch is None else f"{node.name}_{branch}"
        target = node.target
        argument = _mode_argument(node)
        if argument is not None:
            args, kwargs = _with_mode(target, argument, branch == "train", args, kwargs)
        elif node.op == "get_attr":
            target = f"module.{target}"
        elif node.op == "call_module":
            module = self._layer_at(str(target))
            if isinstance(module, BatchNorm):
                inputs = (*args, *kwargs.values())
                if len(inputs) != 1:
                    raise ValueError(
                        f"{node.target}: got {len(inputs)} arguments, expected x alone"
                    )
                return self._operator(node, module, inputs[0], branch)
            return self._add_module(branch, module, args, kwargs, name)
        return self._add(branch, node.op, target, args, kwargs, name)

    def _operator(self, node: fx.Node, layer: BatchNorm, x: Any, branch: str | None) -> fx.Node:
        """Adds one branch's operator of a layer, on variables that both branches' operators
        share."""
        if node not in self._variables:
            self.root.get_submodule("variables").add_module(node.name, layer)
            own = self._variables[node] = []
            for name in VARIABLES:
                target = f"variables.{node.name}.{name}"
                if getattr(layer, name) is None:
                    own.append(None)
                    continue
                own.append(self._add(None, "get_attr", target, (), {}, f"{node.name}_{name}"))
        args = (x, *self._variables[node])
        attributes = layer.operator_attributes(branch == "infer", str(node.target))
        name = f"{node.name}_{branch}"
        made = self._add(branch, "call_function", batch_norm_, args, attributes, name)
        return self._add(branch, "call_function", getattr, (made, "y"), {}, f"{name}_y")

    def _memory(self, branch: str | None) -> Memory:
        """Gives the memory of the nodes that run in a branch, or before both."""
        if branch not in self._memories:
            nodes = [n for n in self.graph.nodes if n.op != "output"]
            nodes = [n for n in nodes if n.meta["branch"] in (None, branch)]
            self._memories[branch] = Memory(nodes, self.root.get_submodule)
        return self._memories[branch]

    def plan(self, target: str) -> fx.Graph:
        """Gives the part of the graph that a target ("train", "infer" or a node's name) depends on:
        data, and statements before it that write in place or assert."""
        if target in self._plans:
            return self._plans[target]
        results = {node.name: node for node in self.graph.nodes if node.op != "output"}
        results.update(self.results)
        if target not in results:
            raise ValueError(f"target: got {target!r}, expected 'train', 'infer' or a node's name")
        wanted: list[fx.Node] = []
        fx.map_arg(results[target], wanted.append)
        if target in self.results:  # all statements of the model in that mode
            memory = self._memory(target)
            needed = _with_inputs([*wanted, *memory.writers])
        else:
            memory = self._memory(wanted[0].meta["branch"])
            needed = _with_inputs(wanted)
            writers = [w for w in memory.writers if w < wanted[0]]
            while missing := [
                w for w in writers if w not in needed and not needed.isdisjoint(memory.seen_by(w))
            ]:
                needed |= _with_inputs(missing)
        plan = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            if node in needed:
                copies[node] = plan.node_copy(node, copies.__getitem__)
        plan.output(fx.map_arg(results[target], copies.__getitem__))
        self._plans[target] = plan
        return plan

    def __str__(self) -> str:
        """Lists the nodes: what is common to both branches, then each branch."""
        lines = []
        for branch in (None, *BRANCHES):
            lines.append("common:" if branch is None else f"{branch}:")
            nodes = (n for n in self.graph.nodes if n.op not in ("get_attr", "output"))
            lines += [f"  {self._line(n)}" for n in nodes if n.meta["branch"] == branch]
            if branch is not None:
                lines.append(f"  return {self.results[branch]}")
        return "\n".join(lines)

    def _line(self, node: fx.Node) -> str:
        def show(value: Any) -> str:
            is_variable = isinstance(value, fx.Node) and value.op == "get_attr"
            return str(value.target).split(".", 1)[1] if is_variable else repr(value)

        args = [show(a) for a in node.args]
        if node.op == "placeholder":
            return f"{node.name} = input"
        if node.target is getattr:
            return f"{node.name} = {args[0]}.{node.args[1]}"
        if node.op == "call_module":
            called = type(self.root.get_submodule(str(node.target))).__name__
        elif node.op == "call_method":
            called = f"{args.pop(0)}.{node.target}"
        else:
            called = getattr(node.target, "__name__", type(node.target).__name__)
        # The layer's name is the node's.
        kwargs = {k: v for k, v in node.kwargs.items() if k != "layer_name" and v is not None}
        args += [f"{k}={show(v)}" for k, v in kwargs.items()]
        return f"{node.name} = {called}({', '.join(args)})"
