# SPDX-License-Identifier: Apache-2.0
"""Which nodes of a graph write in place, and which other nodes may see that."""

import inspect
import operator
from collections.abc import Callable, Iterable

from torch import fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from ..ops import batch_norm, batch_norm_
from .layer import BatchNorm

# Their results are new memory, and batch_norm's. Of all else a result may be a view of the inputs.
_NEW = (_ConvNd, _NormBase, nn.Linear, BatchNorm)
_WRITERS = (
    *("setitem", "delitem", "iadd", "iand", "iconcat", "ifloordiv", "ilshift", "imatmul", "imod"),
    *("imul", "ior", "ipow", "irshift", "isub", "itruediv", "ixor"),
)
_FUNCTIONS = {getattr(operator, name) for name in _WRITERS}
_METHODS = {f"__{name}__" for name in _WRITERS}


def signature_of(function: Callable | str) -> inspect.Signature | None:
    """None for most of what is written in C++."""
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
        # Disjoint sets as trees: each node's parent, itself at the root.
        self._parents = {node: node for node in nodes}
        attributes: dict[str, fx.Node] = {}
        for node in nodes:
            if node.op == "get_attr":
                self._join(node, attributes.setdefault(str(node.target), node))
            elif not self._makes_new_memory(node):
                for source in node.all_input_nodes:
                    self._join(node, source)
        self._members: dict[fx.Node, set[fx.Node]] = {}
        for node in nodes:
            self._members.setdefault(self._root(node), set()).add(node)

    def seen_by(self, writer: fx.Node) -> set[fx.Node]:
        """The nodes whose value may not be the same after a writer ran."""
        members = self._members[self._root(writer)]
        # Modules read parameters and buffers without a node that says so.
        return set(self._parents) if any(n.op == "get_attr" for n in members) else members

    def _root(self, node: fx.Node) -> fx.Node:
        while self._parents[node] is not node:
            self._parents[node] = node = self._parents[self._parents[node]]
        return node

    def _join(self, a: fx.Node, b: fx.Node) -> None:
        self._parents[self._root(a)] = self._root(b)

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
        signature = signature_of(node.target)
        if signature is None or "inplace" not in signature.parameters:
            return False
        bound = signature.bind(*node.args, **node.kwargs)
        return bool(bound.arguments.get("inplace", False))
