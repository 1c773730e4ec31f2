# SPDX-License-Identifier: Apache-2.0
"""What a caller can get wrong: for each case what is given, and what the error must say.

A case is (name, call, text): call(layer) of a fresh layer in training mode, with 4 channels and
leaky_relu, raises a ValueError in whose text the pattern is found: argument, given, allowed.
"""

import math
from functools import partial

import numpy as np
import torch
from torch import nn

import syncbn
from syncbn.functional import sync_batch_norm
from syncbn.ops import batch_norm_
from syncbn.parallel import SelfDataParallel, all_reduce

C = 4
X = torch.linspace(-2, 3, 5 * C * 3).sin().view(5, C, 3)
NAN, INF = math.nan, math.inf
STRIDES = "expected a tensor with strides"
FLOATS = "expected float16, bfloat16, float32 or float64"

INPUTS = {
    "input none": (None, f"^input: got NoneType, {STRIDES}"),
    "input array": (X.numpy(), f"^input: got ndarray, {STRIDES}"),
    "input string": ("x", f"^input: got str, {STRIDES}"),
    "input number": (1.0, f"^input: got float, {STRIDES}"),
    "input sparse": (X.to_sparse(), f"^input: got a tensor of layout torch.sparse_coo, {STRIDES}"),
    "input nested": (torch.nested.nested_tensor([X[0], X[1]]), f"^input: got a nested.*{STRIDES}"),
    "input mkldnn": (X[..., None].to_mkldnn(), f"^input: got .*torch._mkldnn, {STRIDES}"),
    "input int": (X.int(), f"^input: got torch.int32, {FLOATS}"),
    "input bool": (X > 0, f"^input: got torch.bool, {FLOATS}"),
    "input complex": (X.to(torch.complex64), f"^input: got torch.complex64, {FLOATS}"),
    "input float8": (X.to(torch.float8_e4m3fn), f"^input: got torch.float8_e4m3fn, {FLOATS}"),
    "input quantized": (
        torch.quantize_per_tensor(X, 0.1, 0, torch.quint8),
        f"^input: got torch.quint8, {FLOATS}",
    ),
    "input meta": (X.to("meta"), "^input: got a tensor on meta, expected the CPU or CUDA"),
    "input scalar": (X[0, 0, 0], "^input: got 0D input, expected at least 2D"),
    "input one axis": (X[0, 0], "^input: got 1D input, expected at least 2D"),
    "input channels": (X[:, :3], r"^running_mean: got shape \(4,\), expected \(3,\)"),
    "input one value": (X[:1, :, 0], "^Expected more than 1 value per channel .* got 1 over all"),
    "inputs none": ([], "^inputs: got an empty list, expected one tensor per device"),
    "inputs nested": ([[X], X], r"^inputs\[0\]: got list, expected a tensor"),
    "inputs dtypes": ([X, X.double()], r"^inputs\[1\]: got torch.float64, expected torch.float32"),
    "inputs channels": ([X, X[:, :3]], r"^inputs\[1\].*got shape \(4,\), expected \(3,\)"),
    "inputs devices": ([X, X.to("meta")], r"^inputs\[1\]: got a tensor on meta, expected cpu"),
}
LIKE = "expected the input's torch.float32, .* and cpu"
RESIDUALS = {
    "residual shape": (X[..., :2], f"^residual: got torch.float32 of shape .* {LIKE}"),
    "residual broadcast": (X[:1], f"^residual: got torch.float32 of shape .* {LIKE}"),
    "residual dtype": (X.double(), f"^residual: got torch.float64 of .* {LIKE}"),
    "residual meta": (X.to("meta"), f"^residual: got .* on meta, {LIKE}"),
    "residual number": (1.0, f"^residual: got float, {STRIDES}"),
    "residual array": (X.numpy(), f"^residual: got ndarray, {STRIDES}"),
    "residual list": ([X], f"^residual: got list, {STRIDES}"),
    "residual sparse": (X.to_sparse(), f"^residual: got a tensor of layout .* {STRIDES}"),
}
ONES = torch.ones(5, 3)
MASK = r"expected torch.bool or torch.uint8, \(5, 3\) .* and cpu"
MASKS = {
    "mask shape": (X > 0, rf"^mask: got torch.bool of shape \(5, 4, 3\) on cpu, {MASK}"),
    "mask float": (ONES, f"^mask: got torch.float32 of .* {MASK}"),
    "mask negative": (-ONES.to(torch.int8), f"^mask: got torch.int8 of .* {MASK}"),
    "mask long": (ONES.long(), f"^mask: got torch.int64 of .* {MASK}"),
    "mask meta": (ONES.bool().to("meta"), f"^mask: got .* on meta, {MASK}"),
    "mask list": ([True], f"^mask: got list, {STRIDES}"),
    "mask sparse": (ONES.bool().to_sparse(), f"^mask: got a tensor of layout .* {STRIDES}"),
    "mask true": (True, f"^mask: got bool, {STRIDES}"),
}

EPS = "expected a finite number of at least 0"
MOMENTUM = r"expected a number in \[0, 1\], or None"
SLOPE = "expected a finite number of float32"
SECONDS = "expected a positive number of seconds, at most 1e9, or a timedelta"
#: Name, value and text; for the constructor, and, where a layer has such an attribute, for a call.
OPTIONS = [
    *(("eps", v, f"^eps: got {v!r}, {EPS}") for v in (-1, NAN, INF, "1e-5", None, True)),
    *(("momentum", v, f"^momentum: got {v!r}, {MOMENTUM}") for v in (-0.1, 1.5, NAN, "0.1", True)),
    ("momentum", [0.1], rf"^momentum: got \[0.1\], {MOMENTUM}"),
    *(("negative_slope", v, f"^negative_slope: got {v!r}, {SLOPE}") for v in ("a", None, INF)),
    ("negative_slope", 1e300, f"^negative_slope: got 1e.300, {SLOPE}"),
    *(("activation", v, "^activation: got .*, expected one of") for v in ("gelu", None, ["relu"])),
    ("activation", np.array(["relu", "none"]), "^activation: got .*, expected one of"),
    ("statistics", 2, "^statistics: got 2, expected one of"),
    ("affine_grad", "mean", "^affine_grad: got 'mean', expected one of"),
    ("sync", 1, "^sync: got 1, expected True or False"),
    ("inplace", None, "^inplace: got None, expected True or False"),
    *(("timeout", v, "^timeout: got .*" + SECONDS) for v in (0, -1, NAN, INF, "5", True, 1e12)),
    ("engine", "mpi", "^engine: got 'mpi', expected one of"),
    *(
        (
            "process_group",
            v,
            "^process_group: got .*, expected a process group, its name, a DeviceMesh",
        )
        for v in (3, [0], ...)
    ),
    ("dtype", torch.int64, f"^dtype: got torch.int64, {FLOATS}"),
    ("dtype", "float32", f"^dtype: got float32, {FLOATS}"),
    *(
        ("num_features", v, f"^num_features: got {v!r}, expected an integer from 0 to 2\\^31")
        for v in (-1, 2.5, True, "4", None, NAN, 2**31 + 1)
    ),
]

COUNTER = "expected one torch.int64, or a floating-point average, on cpu"
PLACE = "expected memory of its own for each entry"
PARAMETERS = ("weight", "bias", "running_mean", "running_var")
#: A parameter or buffer, what takes its place, and the text.
STATE = [
    *((n, torch.ones(3), rf"^{n}: got shape \(3,\), expected \(4,\)") for n in PARAMETERS),
    *((n, torch.ones(4, 1), rf"^{n}: got shape \(4, 1\), expected \(4,\)") for n in PARAMETERS),
    *((n, torch.ones(4).int(), rf"^{n}: got torch.int32, {FLOATS}") for n in PARAMETERS),
    *((n, torch.ones(4).to("meta"), rf"^{n}: got .* on meta, expected cpu") for n in PARAMETERS),
    *(
        (n, torch.ones(4).to_sparse(), f"^{n}: got a tensor of layout.*{STRIDES}")
        for n in PARAMETERS
    ),
    *((n, np.ones(4), rf"^{n}: got ndarray, {STRIDES}") for n in PARAMETERS),
    *((n, torch.ones(1).expand(4), rf"^{n}: got strides \(0,\).*{PLACE}") for n in PARAMETERS[2:]),
    *(
        ("num_batches_tracked", v, f"^num_batches_tracked: got .*, {COUNTER}")
        for v in (
            torch.tensor(1, dtype=torch.int32),
            torch.tensor(True),
            torch.zeros(2).long(),
            torch.zeros(0).long(),
            torch.tensor(1, device="meta"),
        )
    ),
    ("num_batches_tracked", 3, f"^num_batches_tracked: got int, {STRIDES}"),
]


def _cumulative(count):
    def call(layer):
        layer.momentum = None
        layer.num_batches_tracked.fill_(count)
        layer(X)

    return call


def _function(**given):
    """of sync_batch_norm, which has no layer: of the layer's statistics and parameters."""

    def call(layer):
        own = (layer.running_mean, layer.running_var, layer.weight, layer.bias)
        names = ("running_mean", "running_var", "weight", "bias")
        sync_batch_norm(**{"x": X, **dict(zip(names, own)), "training": True, **given})

    return call


def operator(**given):
    """The same of batch_norm_."""

    def call(layer):
        own = (layer.running_mean, layer.running_var, layer.weight, layer.bias)
        names = ("estimated_mean", "estimated_var", "scale", "bias")
        batch_norm_(**{"x": X, **dict(zip(names, own)), "batches": torch.tensor([2]), **given})

    return call


OPERATOR = (
    ({"x": None}, f"^x: got NoneType, {STRIDES}"),
    ({"x": X.to_sparse()}, f"^x: got a tensor of layout .* {STRIDES}"),
    ({"scale": [1]}, f"^scale: got list, {STRIDES}"),
    ({"estimated_mean": None}, f"^estimated_mean: got NoneType, {STRIDES}"),
    ({"estimated_var": torch.ones(1).expand(4)}, rf"^estimated_var: got strides \(0,\) .*{PLACE}"),
    ({"batches": 1}, f"^batches: got int, {STRIDES}"),
    ({"x": X[0, 0]}, "^x: got 1D input, expected at least 2D"),
    ({"x": X.long()}, f"^x: got torch.int64, {FLOATS}"),
    ({"x": X.to("meta")}, "^x: got a tensor on meta, expected the CPU"),
    ({"x": X[:1, :, 0]}, "^Expected more than 1 value per channel when training, got 1 over all"),
    ({"estimated_mean": torch.ones(2)}, r"^estimated_mean: got shape \(2,\), expected \(4,\)"),
    ({"estimated_var": torch.ones(4).long()}, f"^estimated_var: got torch.int64, {FLOATS}"),
    ({"scale": torch.ones(4, 1)}, r"^scale: got shape \(4, 1\), expected \(4,\)"),
    ({"bias": torch.ones(4, device="meta")}, "^bias: got a tensor on meta, expected cpu"),
    ({"batches": torch.ones(1)}, "^batches: got 1 entries of torch.float32 on cpu, expected one"),
    ({"batches": torch.ones(2).long()}, "^batches: got 2 entries of torch.int64 on cpu, expected"),
    ({"batches": torch.tensor([-1])}, "^batches: got -1, expected a number of at least 0"),
    ({"momentum": 1.5}, r"^momentum: got 1.5, expected a number in \[0, 1\]"),
    ({"epsilon": "1"}, f"^epsilon: got '1', {EPS}"),
    ({"epsilon": INF}, f"^epsilon: got inf, {EPS}"),
    ({"momentum": None}, r"^momentum: got None, expected a number in \[0, 1\]"),
    ({"is_infer": "no"}, "^is_infer: got 'no', expected True or False"),
    ({"use_global_est": 1}, "^use_global_est: got 1, expected True or False"),
    ({"layer_name": 3}, "^layer_name: got 3, expected a string"),
    ({"group": 3}, "^process_group: got 3, expected a process group"),
)

MASKED = torch.masked.MaskedTensor._from_values(X, X > 0)  # without its warning
OPERATORS = "got a MaskedTensor, which does not take this package's operators, expected a plain"

NO_COUNTER = r"^momentum: got None without num_batches_tracked, expected a number in \[0, 1\]"
NEGATIVE = "^running_mean: got a tensor with the negative bit, expected the result of resolve_neg"
FUNCTION = (
    ({"x": MASKED}, f"^input: {OPERATORS}"),
    ({"running_mean": torch._neg_view(torch.zeros(4))}, NEGATIVE),
    ({"momentum": None}, NO_COUNTER),
    ({"momentum": None, "running_mean": None}, NO_COUNTER),
    ({"activation": "gelu"}, "^activation: got 'gelu', expected one"),
    ({"activation": "leaky_relu", "negative_slope": NAN}, f"^negative_slope: got nan, {SLOPE}"),
    ({"eps": INF}, f"^eps: got inf, {EPS}"),
    ({"process_group": 3}, "^process_group: got 3, expected a process group"),
    ({"weight": torch.ones(3)}, r"^weight: got shape \(3,\), expected"),
)

OTHERS = {
    "axes": (
        lambda layer: layer(X.view(5, C, 3, *(1,) * 10)),
        "^input: got 13D input, expected at most 12D",
    ),
    "conjugate": (
        lambda layer: layer(X.to(torch.complex64).conj()),
        f"^input: got torch.complex64, {FLOATS}",
    ),
    "masked": (lambda layer: layer(MASKED), f"^input: {OPERATORS}"),
    "masked residual": (lambda layer: layer(X, MASKED), f"^residual: {OPERATORS}"),
    "counter negative": (_cumulative(-5), r"^num_batches_tracked: got -5, expected 0 to 2\^53"),
    "counter overflows": (_cumulative(2**63 - 1), r"^num_batches_tracked: got 9.*0 to 2\^53"),
    "counter at its end": (
        lambda layer: layer.num_batches_tracked.fill_(2**63 - 1) and layer(X),
        r"^num_batches_tracked: got 2\^63 - 1, expected room for one batch more",
    ),
    "relu in place": (
        lambda layer: layer.__dict__.update(activation="relu", inplace=True) or layer(X),
        "^inplace: got True with relu",
    ),
}

PAIR, TWO = [X, X], "expected a list of 2"
#: Of a call of the layer with lists.
LISTS = (
    ((PAIR, X), f"^residual: got Tensor, {TWO}, one per input"),
    ((PAIR, [X]), f"^residual: got .*, {TWO}, one per input"),
    ((PAIR, [X[:1]] * 2), rf"^inputs\[0\].*residual: got .*{LIKE}"),
    ((PAIR, None, 5), f"^mask: got int, {TWO}"),
    ((PAIR, None, [X > 0]), f"^mask: got .*, {TWO}"),
)
CONVERT, MODULE = syncbn.convert_sync_batchnorm, "expected a torch.nn.Module"
#: A function, its arguments, and the text.
FUNCTIONS = (
    (SelfDataParallel, (None, ["cpu"]), f"^module: got NoneType, {MODULE}"),
    (SelfDataParallel, (nn.ReLU(), "cpu"), "^devices: got 'cpu', expected a list of devices, or"),
    (SelfDataParallel, (nn.ReLU(), [None]), '^devices: got None, expected "cpu", or "cuda:0" and'),
    (all_reduce, ("ab",), "^x: got 'ab', expected a tensor or a list"),
    (all_reduce, ([X, X[:2]],), r"^x\[1\]: got shape \(2, 4, 3\) .*, expected \(5, 4, 3\)"),
    (CONVERT, (nn.BatchNorm1d,), f"^module: got type, {MODULE}"),
    (CONVERT, (nn.BatchNorm1d(4), 7), "^process_group: got 7, expected a process group, its name"),
    (partial(CONVERT, statistics="x"), (nn.ReLU(),), "^statistics: got 'x', expected one of"),
    (syncbn.check, (5,), f"^module: got int, {MODULE}"),
)


def _option(name, value):
    return lambda _: syncbn.SyncBatchNorm(**{"num_features": C, "device": "meta", name: value})


def _changed(name, value):
    """An option that changes after the layer was made."""

    def call(layer):
        setattr(layer, name, value)
        layer(X)

    return call


def _state(name, value):
    def call(layer):
        own = layer._parameters if name in layer._parameters else layer._buffers
        good, own[name] = own[name], value
        try:
            layer(X)
        finally:
            own[name] = good

    return call


LATER = ("eps", "momentum", "negative_slope", "activation", "statistics", "affine_grad")
LATER += ("inplace", "sync")
CASES = [
    *((n, lambda layer, x=x: layer(x), text) for n, (x, text) in INPUTS.items()),
    *((n, lambda layer, z=z: layer(X, z), text) for n, (z, text) in RESIDUALS.items()),
    *((n, lambda layer, m=m: layer(X, None, m), text) for n, (m, text) in MASKS.items()),
    *((f"new {n} {v}", _option(n, v), text) for n, v, text in OPTIONS),
    *((f"changed {n} {v}", _changed(n, v), text) for n, v, text in OPTIONS if n in LATER),
    *((f"{n} {k}", _state(n, v), text) for k, (n, v, text) in enumerate(STATE)),
    *((f"function {k}", _function(**v), text) for k, (v, text) in enumerate(FUNCTION)),
    *((f"operator {k}", operator(**v), t) for k, (v, t) in enumerate(OPERATOR)),
    *((f"list {k}", lambda layer, v=v: layer(*v), text) for k, (v, text) in enumerate(LISTS)),
    *((f"call {k}", lambda _, f=f, v=v: f(*v), text) for k, (f, v, text) in enumerate(FUNCTIONS)),
    *((n, call, text) for n, (call, text) in OTHERS.items()),
]
