# SPDX-License-Identifier: Apache-2.0
"""One of two processes with two devices each: python jax_process.py NUMBER PORT EPSILON. Prints
the hash of y, dx and the state, or the error of check."""

import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax_support as support


def main(number: int, port: str, epsilon: float) -> None:
    jax, np = support.jax, support.np
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, number)
    mesh, (x, dy, scale, bias) = support.mesh_of(4), support.samples()

    def put(array, *spec):
        array = np.asarray(array, np.float32)
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    def local(*arrays):
        found = support.step(*arrays, axis_name="a", epsilon=epsilon)
        whole = {key: jax.lax.all_gather(found[key], "a", tiled=True) for key in ("y", "dx")}
        return found | whole

    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(jax.sharding.PartitionSpec("a"),) * 2 + (jax.sharding.PartitionSpec(),) * 3,
        out_specs=jax.sharding.PartitionSpec(),
        check_vma=False,
    )
    state = jax.tree.map(put, support.fresh())
    found = jax.jit(run)(put(x, "a"), put(dy, "a"), put(scale), put(bias), state)
    found = {key: np.asarray(found[key].addressable_data(0)) for key in ("y", "dx", "mean", "var")}
    try:
        support.syncbn_jax.check(found)
        print("hash", support.digest(*found.values()))
    except support.syncbn_jax.DivergenceError as error:
        print(type(error).__name__, all(np.isnan(found[key]).all() for key in ("y", "dx")))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
