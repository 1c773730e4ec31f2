# SPDX-License-Identifier: Apache-2.0
"""How threads, warps and blocks of the CUDA kernels hand memory over, as programs of ptx_axioms.py.

Instructions are those that nvcc emits for sm_90: atom without .sem and .scope is .relaxed.gpu, and
ld.global.cg is a weak load, as cache operators are hints. bar.warp.sync is taken as a bar.sync of
the warp: 8.9.4 does not name it, but its own description says that it orders memory among its
threads. A warp is a place of its own: the others of its block may have no share of its channel."""

import re
from typing import NamedTuple


class Change(NamedTuple):
    """The instructions of this name are left out, or something in them is another."""

    name: str
    old: str = ""
    new: str = ""

    def __str__(self) -> str:
        return f"with {self.name} {self.new}" if self.old else f"without {self.name}"

    def of(self, program: str) -> str:
        def other(found: re.Match) -> str:
            return found[0].replace(self.old, self.new) if self.old else " "

        return re.sub(rf"[^;:\n]*#{self.name}\b", other, program)


class Protocol(NamedTuple):
    name: str
    program: str
    wrong: str  # an outcome
    changes: list[Change]


def without(*names: str) -> list[Change]:
    return [Change(name) for name in names]


def weaker(name: str, order: str, scope: str, smaller: str) -> list[Change]:
    orders = ["relaxed", "acquire", "release"] if order == "acq_rel" else ["relaxed"]
    return [*(Change(name, order, weak) for weak in orders), Change(name, scope, smaller)]


def of_blocks(program: str, blocks: str = "AB") -> str:
    return "\n".join(program.strip().replace("$", block) for block in blocks)


def one_last(last: str, other: str) -> str:
    """Not: one of two is the last, it has all contributions, and it leaves zeros."""
    first, second = (f"{last.replace('$', b)} and {other.replace('$', c)}" for b, c in ("AB", "BA"))
    return f"not ({first} or {second}) or x != 0 or y != 0 or done != 0"


# finish_channels and pack_staged. Two blocks have a share of a channel, x and y are its slots, and
# done counts blocks. area is the first word of the shared memory where slots are staged (only
# float64's; others stay in registers); the count is there before, and what the block does next
# writes there. The next kernel finds what x, y and done hold at the end.
BLOCKS = """
$: atom.relaxed.gpu.add y 1 #add; bar.sync #added
    d$ = atom.acq_rel.gpu.add done 1 #count; st.weak area$ d$; bar.sync #counted
    l$ = ld.weak area$; bar.sync #read
    @l$==1 x$ = ld.weak x; @l$==1 st.weak area$ x$; @l$==1 st.weak x 0; @l$==1 bar.warp.sync #staged
    @l$==1 bar.sync #free; st.weak area$ 9
$: atom.relaxed.gpu.add x 1 #add; bar.sync #added
    bar.sync #counted
    m$ = ld.weak area$; bar.sync #read
    @m$==1 y$ = ld.weak y; @m$==1 st.weak y 0
    @m$==1 e$ = ld.weak done; @m$==1 st.weak done 0; @m$==1 bar.warp.sync #staged
    @m$==1 p$ = ld.weak area$; @m$==1 bar.sync #free
"""
# Without kShares nothing is written there before the next job's barrier for additions.
COLUMNS = re.sub(r"@.\$==1 bar.sync #free", "bar.sync #next_added", BLOCKS)
# sum_planes. The other lanes have the count by a shuffle, which orders no memory.
WARPS = """
$: atom.relaxed.gpu.add y 1 #add; bar.warp.sync #added
    d$ = atom.acq_rel.gpu.add done 1 #count; bar.warp.sync #counted
    @d$==1 x$ = ld.weak x; @d$==1 st.weak area$ x$; @d$==1 st.weak x 0; @d$==1 bar.warp.sync #staged
    bar.warp.sync #next_added; st.weak area$ 9
$: atom.relaxed.gpu.add x 1 #add; bar.warp.sync #added
    bar.warp.sync #counted
    @d$==1 y$ = ld.weak y; @d$==1 st.weak y 0
    @d$==1 e$ = ld.weak done; @d$==1 st.weak done 0; @d$==1 bar.warp.sync #staged
    @d$==1 p$ = ld.weak area$; bar.warp.sync #next_added
"""
# Three blocks with a thread each: the last one knows of the first by way of the second.
CHAIN = """
$: atom.relaxed.gpu.add x 1 #add; d$ = atom.acq_rel.gpu.add done 1 #count
    @d$==2 x$ = ld.weak x; @d$==2 st.weak x 0; @d$==2 e$ = ld.weak done; @d$==2 st.weak done 0
"""
PACKED = "x$ == 2 and y$ == 2 and e$ == 2 and p$ == 2"
OF_BLOCKS = one_last(f"l$ == 1 and m$ == 1 and {PACKED}", "l$ == 0 and m$ == 0")
COUNTING = [*weaker("count", "acq_rel", "gpu", "cta"), Change("add", "gpu", "cta")]

# Two rounds through shared memory: the lanes of sum_rows, the planes of sum_short_planes (whose
# barriers are the warp's), the moments of welford_kernel. The constants of map_dense_planes and
# map_dense_rows go half a round.
STAGING = """
A: st.weak x 1; bar.sync #staged; r = ld.weak y; bar.sync #read
    st.weak x 2; bar.sync #staged; t = ld.weak y
A: st.weak y 1; bar.sync #staged; s = ld.weak x; bar.sync #read
    st.weak y 2; bar.sync #staged; u = ld.weak x
"""
# running_kernel: cumulative averages take the counter in all threads. (In moments_kernel only the
# thread that raises it reads it.)
COUNTER = """
A: r = ld.weak n; bar.sync #read; st.weak n 1
A: s = ld.weak n; bar.sync #read
"""

PROTOCOLS = [
    Protocol(
        "the last block packs",
        of_blocks(BLOCKS),
        OF_BLOCKS,
        without("added", "counted", "read", "staged", "free") + COUNTING,
    ),
    Protocol(
        "the last block packs, 2-D input",
        of_blocks(COLUMNS),
        OF_BLOCKS,
        without("added", "counted", "read", "staged", "next_added") + COUNTING,
    ),
    Protocol(
        "the last warp packs",
        of_blocks(WARPS),
        one_last(f"d$ == 1 and {PACKED}", "d$ == 0"),
        without("added", "counted", "staged", "next_added") + COUNTING,
    ),
    Protocol(
        "the last of three blocks",
        of_blocks(CHAIN, "ABC"),
        "{dA, dB, dC} != {0, 1, 2} or {xA, xB, xC} != {None, 3} or {eA, eB, eC} != {None, 3} "
        "or x != 0 or done != 0",
        COUNTING,
    ),
    Protocol(
        "rounds through shared memory",
        STAGING,
        "r != 1 or s != 1 or t != 2 or u != 2",
        without("staged", "read"),
    ),
    Protocol("the counter of batches", COUNTER, "r != 0 or s != 0 or n != 1", without("read")),
]
