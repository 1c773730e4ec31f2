# SPDX-License-Identifier: Apache-2.0
"""That lint.py finds what is planted.

python sass_test.py PTXAS
"""

import sys
import unittest

from lint import conversions, inexact, lint
from sass import listing_of

PTXAS = "ptxas"

KERNEL = """.version 8.0
.target sm_80
.address_size 64
.visible .entry map_dense_planesIf(.param .u64 p, .param .u32 n)
{
  .local .align 8 .b8 depot[64];
  .reg .pred %p<2>;
  .reg .f32 %f<9>;
  .reg .b32 %r<9>;
  .reg .b64 %rd<9>;
  ld.param.u64 %rd1, [p];
  ld.param.u32 %r1, [n];
  cvta.to.global.u64 %rd2, %rd1;
  mov.u64 %rd3, depot;
  mov.u32 %r2, 0;
$LOOP:
  .pragma "nounroll";
  ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd2];
  add.rn.f32 %f1, %f1, %f2;
  st.global.v4.f32 [%rd2], {%f1, %f2, %f3, %f4};
  add.s64 %rd2, %rd2, 16;
  add.s32 %r2, %r2, 1;
  setp.lt.u32 %p1, %r2, %r1;
  @%p1 bra $LOOP;
  ret;
}
"""
ADD = "add.rn.f32 %f1, %f1, %f2;"


class Planted(unittest.TestCase):
    def lint(self, before: str = "", after: str = "") -> list[str]:
        ptx = KERNEL.replace(before, after) if before else KERNEL
        self.assertEqual(ptx == KERNEL, not before)
        found = [lint(listing_of(ptx, a, PTXAS), ptx.splitlines(), set()) for a in ("80", "90")]
        self.assertEqual(len(found[0]), len(found[1]))
        return found[1]

    def test_an_intact_kernel_passes(self):
        self.assertEqual(self.lint(), [])

    def test_local_memory_is_found(self):
        indexed = """
          and.b32 %r3, %r2, 7; mul.wide.u32 %rd4, %r3, 8; add.s64 %rd5, %rd3, %rd4;
          st.local.f32 [%rd5], %f1; and.b32 %r4, %r1, 7; mul.wide.u32 %rd6, %r4, 8;
          add.s64 %rd7, %rd3, %rd6; ld.local.f32 %f1, [%rd7];"""
        (error,) = self.lint(ADD, ADD + indexed)
        self.assertIn("local memory, ['LDL', 'STL']", error)

    def test_flushed_subnormals_are_found(self):
        (error,) = self.lint("add.rn.f32", "add.rn.ftz.f32")
        self.assertIn("FADD.FTZ of add.rn.ftz.f32 %f1, %f1, %f2;", error)

    def test_divisions_may_flush_what_they_have_scaled(self):
        self.assertIn(".FTZ", listing_of(KERNEL.replace("add.rn", "div.rn"), "90", PTXAS))
        self.assertEqual(self.lint("add.rn", "div.rn"), [])

    def test_narrow_stores_are_found(self):
        store = "st.global.v4.f32 [%rd2], {%f1, %f2, %f3, %f4};"
        half = "st.global.v2.f32 [%rd2], {%f1, %f2};"
        (error,) = self.lint(store, half)
        self.assertIn("expected accesses of 128 bits in the main loop", error)
        self.assertIn("STG.E.64", error)

    def test_inexact_arithmetic_is_found(self):
        self.assertEqual(inexact(KERNEL), set())
        for op in ("add.f32", "add.rz.f32", "add.rn.ftz.f32", "div.full.f32", "rcp.approx.f32"):
            self.assertEqual(inexact(KERNEL.replace("add.rn.f32", op)), {op})

    def test_conversions_are_found_where_there_are_few_units_for_binary64(self):
        sums = KERNEL.replace("map_dense_planes", "sum_planes").replace(ADD, "cvt.f64.f32 %d, %f1;")
        self.assertEqual(conversions(sums), [])
        (error,) = conversions(sums.replace("sm_80", "sm_120"))
        self.assertIn("sum_planesIf: cvt.f64.f32", error)
        self.assertEqual(conversions(KERNEL.replace("sm_80", "sm_120")), [])


if __name__ == "__main__":
    PTXAS = sys.argv.pop(1)
    unittest.main()
