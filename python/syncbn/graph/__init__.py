# SPDX-License-Identifier: Apache-2.0
"""Networks that fork at their batch normalization: one graph with a training and an inference
branch, which share all parameters and variables and are run by target (docs/forked_graph.md)."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..exchange import callers
from .layer import BatchNorm, BatchNormAttributes, from_plain
from .network import Fork, Run

__all__ = ["BatchNorm", "BatchNormAttributes", "Network", "batch_norm_layer"]


class _Tracer(fx.Tracer):
    # Otherwise what a model computes from its buffers would happen now, and once.
    proxy_buffer_attributes = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, (BatchNorm, _BatchNorm)) or super().is_leaf_module(
            m, module_qualified_name
        )


def _trace(model: nn.Module) -> fx.Graph:
    """Raises ValueError where the model assigns to a buffer, which a graph cannot; it keeps its
    buffers."""
    buffers = [
        (module, path, name, buffer)
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
    ]
    assigned = []
    try:
        graph = _Tracer().trace(model)
    finally:
        for module, path, name, buffer in buffers:
            if module._buffers[name] is not buffer:
                module._buffers[name] = buffer
                assigned.append(f"{path}.{name}".lstrip("."))
    if assigned:
        raise ValueError(
            f"model: got an assignment to the buffer {assigned[0]!r}, expected one that is written "
            "in place, as by copy_()"
        )
    return graph


class _Batches:
    """The batches of train() without arguments, one after the other, again and again."""

    def __init__(self, data: Iterable | None) -> None:
        self.data = data
        self.rest: Iterator | None = None

    def __getstate__(self) -> dict:
        return {"data": self.data, "rest": None}  # a copy begins anew

    def next(self) -> tuple[tuple, dict]:
        """Gives the next one as arguments, by position and by name."""
        if self.data is None:
            raise ValueError(
                "data: got none, expected a source of batches, or arguments of train()"
            )
        if self.rest is None:
            self.rest = iter(self.data)
        for _ in range(2):
            for batch in self.rest:
                if isinstance(batch, dict):
                    return (), batch
                return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), {}
            self.rest = iter(self.data)
        raise ValueError("data: got no batch, expected at least one")


class Network(nn.Module):
    """A model with a training and an inference branch.

    The operations before the first one that depends on the mode (a batch normalization, dropout)
    are common to both branches. All later ones exist twice and never merge again. The branches
    share every parameter and variable. A run computes what its target depends on, and what the
    model writes in place. A copy is a network of its own.

    As a module it has the model as `module`. Called, as DistributedDataParallel and
    SelfDataParallel do, it runs the branch of its own mode: training, or inference after eval().

    Args:
        model: an nn.Module that torch.fx can trace, with BatchNorm layers. None: an empty network
            that input(), append(), batch_norm_layer() and output() fill.
        loss: a function or module (output, target) -> loss. If given, the training branch computes
            the loss.
        data: batches for train() without arguments: an iterable of tuples (arguments of train),
            dicts (keyword arguments) or tensors. It is started again when it ends.
        convert: treat torch.nn.BatchNorm1d, 2d, 3d, SyncBatchNorm and syncbn.SyncBatchNorm as
            BatchNorm with the same parameters and buffers. The model is not changed.
        group: the process group of converted layers. None: their own, or the default one.

    Raises:
        ValueError: a layer is not a BatchNorm and convert is False, or it cannot be converted; or
            the model assigns to a buffer.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        loss: Callable | None = None,
        data: Iterable | None = None,
        convert: bool = False,
        group: "callers.Group" = None,
    ) -> None:
        super().__init__()
        if isinstance(model, _BatchNorm):  # as a layer of a model, which can be taken over
            model = nn.Sequential(model)
        self.module = nn.Module() if model is None else model
        self.loss = loss
        self._batches = _Batches(data)
        self._convert = convert
        self._group = group
        self._converted: dict[str, BatchNorm] = {}
        self._fork: Fork | None = None
        if model is None:
            self._source = fx.Graph()
            self._proxies = fx.proxy.GraphAppendingTracer(self._source)
        else:
            self._source = _trace(model)
            self._complete()

    # Building a network node by node.

    def input(self, name: str = "x") -> fx.Proxy:
        """Adds an input to the network and returns its node."""
        self._refuse_if_complete()
        if any(n.op == "placeholder" and n.target == name for n in self._source.nodes):
            raise ValueError(f"name: got {name!r}, expected one that is not taken")
        return self._proxies.create_proxy("placeholder", name, (), {})

    def append(
        self, operation: Callable[..., Any], *args: Any, name: str | None = None, **kwargs: Any
    ) -> fx.Proxy:
        """Adds an operation: a module or a function, applied to nodes and constants.

        Functions of torch and operators can also be called on nodes directly.

        Returns:
            The node of the result.
        """
        self._refuse_if_complete()
        if not isinstance(operation, nn.Module):
            name = name or getattr(operation, "__name__", type(operation).__name__)
            return self._proxies.create_proxy("call_function", operation, args, kwargs, name=name)
        target = name or type(operation).__name__.lower()
        number = 0
        while target in self.module._modules and self.module._modules[target] is not operation:
            if name is not None:
                raise ValueError(f"name: got {name!r}, expected one that is not taken")
            number += 1
            target = f"{type(operation).__name__.lower()}_{number}"
        self.module.add_module(target, operation)
        return self._proxies.create_proxy("call_module", target, args, kwargs, name=target)

    def output(self, node: fx.Proxy) -> None:
        """Completes the network, whose result is `node`, and forks it."""
        self._refuse_if_complete()
        self._proxies.create_proxy("output", "output", (node,), {})
        self._complete()

    def _refuse_if_complete(self) -> None:
        if self._fork is not None:
            raise RuntimeError("the network is complete; nothing can be added")

    def _complete(self) -> None:
        self._fork = Fork(self._source, self.module, self._layer_at, self.loss)

    # A copy forks anew, so that its converted layers hold the buffers of its own model.

    def __getstate__(self) -> dict:
        self._forked()
        own = {n: v for n, v in vars(self).items() if n not in ("_fork", "_proxies")}
        return {**own, "_converted": {}}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._complete()

    def _forked(self) -> Fork:
        if self._fork is None:
            raise RuntimeError("the network has no output yet")
        return self._fork

    # Running it.

    @property
    def graph(self) -> fx.Graph:
        """The graph with both branches."""
        return self._forked().graph

    def __str__(self) -> str:
        return str(self._forked())

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        """Runs the training branch as train() does, or the inference branch after eval(), with
        gradients."""
        if self.training:
            return self._train(inputs, named_inputs)
        return self.run("infer", *inputs, **named_inputs)

    def _train(self, inputs: tuple, named_inputs: dict) -> Any:
        if not inputs and not named_inputs:
            inputs, named_inputs = self._batches.next()
        return self.run("train", *inputs, **named_inputs)

    def train(self, *inputs: Any, **named_inputs: Any) -> Any:
        """Runs the training branch on the given inputs, or on the next batch of `data`.

        The keyword `target` is the loss's second argument. Returns the loss, or the output of a
        network without a loss. train(True) and train(False) run nothing: they set the mode of the
        network as of any module.
        """
        if len(inputs) == 1 and isinstance(inputs[0], bool) and not named_inputs:
            return super().train(inputs[0])
        return self._train(inputs, named_inputs)

    @torch.no_grad()
    def infer(self, *inputs: Any, **named_inputs: Any) -> Any:
        """Runs the inference branch, without gradients or updates, and returns its output."""
        return self.run("infer", *inputs, **named_inputs)

    def run(self, target: str, /, *inputs: Any, **named_inputs: Any) -> Any:
        """Computes one node, and what it depends on, and returns its value.

        Args:
            target: "train", "infer", or a node's name (see print(network)). The value is the one
                that the node has at its place in the model.
            inputs: the inputs that the target depends on, in their order or by name.

        Raises:
            ValueError: there is no such target, or the inputs are not those that it needs.
        """
        fork = self._forked()
        plan = fork.plan(target)
        placeholders = [node for node in plan.nodes if node.op == "placeholder"]
        names = [node.target for node in placeholders]
        defaults = {node.target: node.args[0] for node in placeholders if node.args}
        given = dict(zip(names, inputs, strict=False))
        values = {**defaults, **given, **named_inputs}
        if len(inputs) > len(names) or given.keys() & named_inputs or values.keys() != set(names):
            raise ValueError(
                f"inputs of {target!r}: got {len(inputs)} by position and {list(named_inputs)} by "
                f"name, expected {names}"
            )
        ordered = [values[name] for name in names]
        return Run(fork.root, graph=plan).run(*ordered, enable_io_processing=False)

    def _layer_at(self, path: str) -> nn.Module:
        module = self.module.get_submodule(path)
        if not isinstance(module, _BatchNorm):
            return module
        if not self._convert:
            raise ValueError(
                f"model: got {type(module).__name__} at {path!r}, expected syncbn.graph.BatchNorm, "
                "or convert=True"
            )
        if path not in self._converted:
            self._converted[path] = from_plain(module, path, self._group)
        return self._converted[path]


def batch_norm_layer(
    net: Network,
    input: fx.Proxy,
    output: str | None,
    scale: nn.Parameter,
    bias: nn.Parameter,
    use_global_est: bool = False,
    epsilon: float = 1e-6,
    momentum: float = 0.99,
    group: "callers.Group" = None,
) -> fx.Proxy:
    """Adds a batch normalization to a network.

    Its training and its inference operator share new variables estimated_mean, estimated_var and
    batches.

    Args:
        net: a network that is not complete yet.
        input: the node to normalize.
        output: a name for the output, which the layer has in net.module and in the graph, where a
            branch adds its own to it. None: the name of the class.
        scale, bias: parameters of shape (C,).
        use_global_est, epsilon, momentum, group: as for syncbn.ops.batch_norm.

    Returns:
        The node of the output.

    Raises:
        ValueError: an argument is refused.
    """
    if output is not None and not isinstance(output, str):
        raise ValueError(f"output: got {type(output).__name__}, expected a name, or None")
    for argument, value in (("scale", scale), ("bias", bias)):
        if not isinstance(value, nn.Parameter) or value.dim() != 1 or len(value) != len(scale):
            got = f"shape {tuple(value.shape)}" if isinstance(value, nn.Parameter) else type(value)
            raise ValueError(f"{argument}: got {got}, expected a parameter, one entry per channel")
    layer = BatchNorm(
        len(scale), use_global_est, epsilon, momentum, group, device=scale.device, dtype=scale.dtype
    )
    layer.scale, layer.bias = scale, bias
    return net.append(layer, input, name=output)
