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
0$: atom.relaxed.gpu.add y 1 #add; bar.sync #added
    d$ = atom.acq_rel.gpu.add done 1 #count; st.weak area$ d$; bar.sync #counted
    l$ = ld.weak area$; bar.sync #read
    @l$==1 x$ = ld.weak x; @l$==1 st.weak area$ x$; @l$==1 st.weak x 0; @l$==1 bar.warp.sync #staged
    @l$==1 bar.sync #free; st.weak area$ 9
0$: atom.relaxed.gpu.add x 1 #add; bar.sync #added
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
0$: atom.relaxed.gpu.add y 1 #add; bar.warp.sync #added
    d$ = atom.acq_rel.gpu.add done 1 #count; bar.warp.sync #counted
    @d$==1 x$ = ld.weak x; @d$==1 st.weak area$ x$; @d$==1 st.weak x 0; @d$==1 bar.warp.sync #staged
    bar.warp.sync #next_added; st.weak area$ 9
0$: atom.relaxed.gpu.add x 1 #add; bar.warp.sync #added
    bar.warp.sync #counted
    @d$==1 y$ = ld.weak y; @d$==1 st.weak y 0
    @d$==1 e$ = ld.weak done; @d$==1 st.weak done 0; @d$==1 bar.warp.sync #staged
    @d$==1 p$ = ld.weak area$; bar.warp.sync #next_added
"""
# Three blocks with a thread each: the last one knows of the first by way of the second.
CHAIN = """
0$: atom.relaxed.gpu.add x 1 #add; d$ = atom.acq_rel.gpu.add done 1 #count
    @d$==2 x$ = ld.weak x; @d$==2 st.weak x 0; @d$==2 e$ = ld.weak done; @d$==2 st.weak done 0
"""
PACKED = "x$ == 2 and y$ == 2 and e$ == 2 and p$ == 2"
OF_BLOCKS = one_last(f"l$ == 1 and m$ == 1 and {PACKED}", "l$ == 0 and m$ == 0")
COUNTING = [*weaker("count", "acq_rel", "gpu", "cta"), Change("add", "gpu", "cta")]

# Two rounds through shared memory: the lanes of sum_rows, the planes of sum_short_planes (whose
# barriers are the warp's), the moments of welford_kernel. The constants of map_dense_planes and
# map_dense_rows go half a round.
STAGING = """
0A: st.weak x 1; bar.sync #staged; r = ld.weak y; bar.sync #read
    st.weak x 2; bar.sync #staged; t = ld.weak y
0A: st.weak y 1; bar.sync #staged; s = ld.weak x; bar.sync #read
    st.weak y 2; bar.sync #staged; u = ld.weak x
"""
# running_kernel: cumulative averages take the counter in all threads. (In moments_kernel only the
# thread that raises it reads it.)
COUNTER = """
0A: r = ld.weak n; bar.sync #read; st.weak n 1
0A: s = ld.weak n; bar.sync #read
"""

# meet_grid of one_rank.cuh. Two blocks write a word each, p and q, and read the other's; the first
# thread of each waits for both blocks. The next kernel finds what arrived and left hold at the end.
GRID = """
0A: bar.sync #written; n = atom.acq_rel.gpu.add arrived 1 #arrive
    a = ld.acquire.gpu arrived #wait; assume a>=2; c = atom.acq_rel.gpu.add left 1 #leave
    @c==1 st.weak arrived 0; @c==1 st.weak left 0; bar.sync #met
0A: st.weak p 1; bar.sync #written; bar.sync #met; r = ld.weak q
0B: bar.sync #written; m = atom.acq_rel.gpu.add arrived 1 #arrive
    b = ld.acquire.gpu arrived #wait; assume b>=2; d = atom.acq_rel.gpu.add left 1 #leave
    @d==1 st.weak arrived 0; @d==1 st.weak left 0; bar.sync #met
0B: st.weak q 1; bar.sync #written; bar.sync #met; s = ld.weak p
"""

# peer_exchange.cuh. Blocks of two devices send to each other in each epoch, by way of two buffers
# in turn: p and q for what A sends. (What B sends is alike.) One thread of each block has the
# flags, the other one the payload. B sends its flag of an epoch when it has read all earlier
# payloads, and A waits for that flag before the epoch in which it writes to the same buffer.
PEERS = """
0A: bar.sync #sent; st.release.sys flag_b 1 #to_B; u = ld.acquire.sys flag_a #from_B; assume u>=1
    bar.sync; bar.sync #sent; st.release.sys flag_b 2 #to_B
    v = ld.acquire.sys flag_a #from_B; assume v>=2; bar.sync #free
    bar.sync #sent; st.release.sys flag_b 3 #to_B
0A: st.weak p 1; bar.sync #sent
    bar.sync; st.weak q 2 #even; bar.sync #sent
    bar.sync #free
    st.weak p 3; bar.sync #sent
1B: bar.sync; st.release.sys flag_a 1; a = ld.acquire.sys flag_b #from_A; assume a>=1
    bar.sync #received; bar.sync #used; st.release.sys flag_a 2 #to_A
    b = ld.acquire.sys flag_b #from_A; assume b>=2; bar.sync #received
    bar.sync; st.release.sys flag_a 3; c = ld.acquire.sys flag_b #from_A; assume c>=3
    bar.sync #received
1B: bar.sync; bar.sync #received; r = ld.weak p; bar.sync #used
    bar.sync #received; s = ld.weak q #even; bar.sync
    bar.sync #received; t = ld.weak p
"""
# A's message of epoch 2 is one of another call. A thread of B looks at the headers, h and i, and
# tells the other one, which must not use that payload. (In the kernel each thread looks itself.)
HEADER = """
0A: st.weak h 1; st.weak p 1; st.release.sys flag 1 #to_B
    st.weak i 9; st.weak q 9; st.release.sys flag 2 #to_B
1B: a = ld.acquire.sys flag #from_A; assume a>=1; b = ld.weak h; st.weak good b; bar.sync #verified
    bar.sync #used
    c = ld.acquire.sys flag #from_A; assume c>=2; d = ld.weak i; st.weak good d; bar.sync #verified
1B: bar.sync #verified; e = ld.weak good; @e==1 r = ld.weak p; bar.sync #used
    bar.sync #verified; f = ld.weak good; @f==1 s = ld.weak q
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
    Protocol(
        "all blocks of a kernel meet",
        GRID,
        "r != 1 or s != 1 or arrived != 0 or left != 0",
        without("written", "met")
        # (Who waits acquires, so that an arrival need not.)
        + [Change("arrive", "acq_rel", order) for order in ("relaxed", "acquire")]
        + [Change("arrive", "gpu", "cta")]
        + weaker("wait", "acquire", "gpu", "cta")
        + weaker("leave", "acq_rel", "gpu", "cta"),
    ),
    Protocol(
        "two devices, peer memory",
        PEERS,
        "r != 1 or s != 2 or t != 3",
        without("sent", "received", "used", "free")
        + weaker("to_A", "release", "sys", "gpu")
        + weaker("to_B", "release", "sys", "gpu")
        + weaker("from_A", "acquire", "sys", "gpu")
        + weaker("from_B", "acquire", "sys", "gpu")
        + [Change("even", "q", "p")],
    ),
    Protocol(
        "the header of a peer's message",
        HEADER,
        "r != 1 or f != 9",
        without("verified", "used")
        + weaker("to_B", "release", "sys", "gpu")
        + weaker("from_A", "acquire", "sys", "gpu"),
    ),
]
