# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

from spack.package import conflicts, depends_on, license, variant, version
from spack_repo.builtin.build_systems.cmake import CMakePackage


class Syncbn(CMakePackage):
    """Batch normalization whose statistics are shared by all ranks, with the same bits for any
    number of them."""

    # The sources that this lies in, for want of an address.
    git = Path(__file__).resolve().parents[6].as_uri()

    license("Apache-2.0")

    version("0.1.0", tag="v0.1.0")

    variant("cuda", default=False, description="Build the CUDA kernels")
    variant("mpi", default=False, description="Build groups over MPI")
    variant("shared", default=True, description="Build shared libraries")

    depends_on("c", type="build", when="+mpi")
    depends_on("cxx", type="build")
    depends_on("cmake@3.22:", type="build")
    depends_on("cuda@12.8:", when="+cuda")
    depends_on("mpi@3:", when="+mpi")

    conflicts("platform=darwin")
    conflicts("platform=windows")
    conflicts("%gcc@:11", msg="C++20 needs g++ 12")

    def cmake_args(self):
        return [
            self.define("SYNCBN_NCCL", False),
            self.define_from_variant("SYNCBN_CUDA", "cuda"),
            self.define_from_variant("SYNCBN_MPI", "mpi"),
            self.define_from_variant("BUILD_SHARED_LIBS", "shared"),
        ]
