# SPDX-License-Identifier: Apache-2.0
"""One layer in JAX, syncbn_jax against flax: forward and backward on some devices of one process.

python benchmarks/bench_jax.py DEVICES SECONDS ROUNDS SHAPE...

Prints rows as JSON. Shapes are N x C x spatial, as elsewhere; arrays are channels last and lie on
their devices. The number of devices is that of the process.
"""

import json
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={sys.argv[1]}"

import common
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from jax.sharding import NamedSharding, PartitionSpec

import syncbn_jax


def ours(x, scale, bias, state):
    return syncbn_jax.batch_norm(x, scale, bias, state, axis_name="devices")


def flaxs(x, scale, bias, state):
    layer = linen.BatchNorm(use_running_average=False, axis_name="devices")
    variables = {"params": {"scale": scale, "bias": bias}, "batch_stats": state}
    y, new = layer.apply(variables, x, mutable=["batch_stats"])
    return y, new["batch_stats"]


def directions_of(layer, mesh):
    """The two programs: y, what the backward needs and the state; then the gradients."""
    divided, same = PartitionSpec("devices"), PartitionSpec()
    specs = {"in_specs": (divided, same, same, same), "out_specs": (divided, same)}
    train = jax.shard_map(layer, mesh=mesh, **specs)

    def forward(x, scale, bias, state):
        return jax.vjp(lambda *a: train(*a, state), x, scale, bias, has_aux=True)

    return jax.jit(forward), jax.jit(lambda pull, dy: pull(dy))


def finished(program, *arguments):
    return jax.block_until_ready(program(*arguments))


def measure(shape: common.Shape, seconds: float, least: int) -> list[dict]:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("devices",))
    rng, last = np.random.default_rng(0), (shape[0], *shape[2:], shape[1])

    def put(array, *spec):
        return jax.device_put(
            jnp.asarray(array, jnp.float32), NamedSharding(mesh, PartitionSpec(*spec))
        )

    x, dy = (put(rng.standard_normal(last), "devices") for _ in range(2))
    ones, zeros = put(np.ones(shape[1])), put(np.zeros(shape[1]))
    given = (x, ones, zeros, {"mean": zeros, "var": ones})
    programs = {"syncbn": directions_of(ours, mesh), "flax": directions_of(flaxs, mesh)}
    clock = common.Clock()

    def play(take: common.Clock) -> None:
        for name, (forward, backward) in programs.items():
            _, pull, _ = take((name, "forward"), finished, forward, *given)
            take((name, "backward"), finished, backward, pull, dy)

    play(common.Clock())  # compiles
    play(clock)
    one_round = sum(times[0] for times in clock.times.values()) / 1e3
    for _ in range(common.rounds_for(seconds, one_round, least, 1000)):
        play(clock)
    rows = []
    for direction in ("forward", "backward"):
        times = {name: clock.times[name, direction] for name in programs}
        row = {"devices": len(jax.devices()), "shape": common.text_of(shape)}
        row |= {"direction": direction, "rounds": len(times["flax"])}
        row["milliseconds"] = {name: common.quartiles(t) for name, t in times.items()}
        rows.append(row | {"ratio": common.ratio(times["syncbn"], times["flax"])})
    return rows


if __name__ == "__main__":
    _, _, limit, rounds, *shapes = sys.argv
    found = [
        row for s in shapes for row in measure(common.parse_shape(s), float(limit), int(rounds))
    ]
    print(json.dumps(found))
