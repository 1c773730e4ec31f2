#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: packaging/check.sh VENV
# Renders the conda recipe with the rattler-build of VENV, builds the Debian packages of the committed
# sources in build/debian, and gives them to lintian. It needs debhelper and lintian.
set -euo pipefail
cd "$(dirname "$0")/.."

"$1/bin/python" - <<'END'
from rattler_build import Stage0Recipe, VariantConfig

recipe = Stage0Recipe.from_file("packaging/conda/recipe.yaml")
forge = {"c_stdlib": ["sysroot"], "c_stdlib_version": ["2.28"]}  # of conda-forge
for variant in recipe.render(VariantConfig(forge)):
    print("conda: renders", variant.recipe.to_dict()["package"])
END

tree=build/debian/syncbn
rm -rf build/debian
mkdir -p "$tree"
git archive HEAD | tar -x -C "$tree"
cp -r packaging/debian "$tree/debian"
# The environment's CMake is not Debian's.
(cd "$tree" && PATH=/usr/sbin:/usr/bin:/sbin:/bin dpkg-buildpackage --build=binary --no-sign)
lintian --fail-on error,warning --suppress-tags initial-upload-closes-no-bugs build/debian/*.changes
