# SPDX-License-Identifier: Apache-2.0
"""All executions of a small program that PTX's memory model allows.

The model is chapter 8 of the PTX ISA 9 ("Memory Consistency Model", its sections are named below),
as Lustig, Sahasrabuddhe and Giroux formalized it ("A Formal Analysis of the NVIDIA PTX Memory
Consistency Model", ASPLOS 2019), without what no kernel here uses: fences, other devices, proxies,
and accesses that overlap in part.

A thread of a program begins with its block on a new line: "A: ...".
Instructions are PTX's, with locations and registers by name; ";" or a new line is between them:
    r = ld.weak x | st.release.gpu x 1 | r = atom.acq_rel.gpu.add x 1 | bar.sync | bar.warp.sync
    @r==1 ...       executed if this holds. The register may be another thread's, as by a shuffle
    ... #name       a name of the instruction
Locations are 0 at first. A register is written once."""

import functools
import itertools
import operator
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

COMPARISONS = {"==": operator.eq, "!=": operator.ne, ">=": operator.ge}


class Event(NamedTuple):
    thread: int  # -1: the writes before all threads
    text: str
    op: str
    order: str
    scope: str  # none: weak
    location: str
    operand: str
    register: str
    guard: str

    reads = property(lambda self: self.op in ("ld", "atom"))
    writes = property(lambda self: self.op in ("st", "atom"))
    memory = property(lambda self: self.reads or self.writes)
    acquires = property(lambda self: self.order in ("acquire", "acq_rel"))
    releases = property(lambda self: self.order in ("release", "acq_rel"))


class Execution(NamedTuple):
    registers: dict[str, int]
    memory: dict[str, int]  # at the end
    flaw: str  # a data race, or a barrier that only some threads reach
    text: str


def parse(thread: int, text: str) -> Event:
    found = re.fullmatch(
        r"(?:@(\S+) )?(?:(\w+) = )?(ld|st|atom|bar)"
        r"(?:\.(weak|relaxed|acquire|release|acq_rel|sync|warp\.sync))?(?:\.(cta|gpu))?"
        r"(?:\.add)?(?: ([\w>=!]+))?(?: (\w+))?",
        text,
    )
    if not found:
        raise ValueError(f"unknown instruction: {text}")
    guard, register, op, order, scope, location, operand = (part or "" for part in found.groups())
    return Event(thread, text, op, order, scope, location, operand, register, guard)


@functools.cache
def condition(text: str) -> tuple[str, Callable[[int], bool]]:
    """The register of a condition, and whether a value fits."""
    register, comparison, constant = re.split(r"(\W+)", text)
    return register, lambda value: COMPARISONS[comparison](value, int(constant))


def bits(row: int) -> Iterator[int]:
    while row:
        yield (row & -row).bit_length() - 1
        row &= row - 1


def closure(rows: list[int]) -> list[int]:
    """The transitive closure of a relation; bit j of row i: i is before j."""
    rows = rows[:]
    for k, bit in enumerate(1 << k for k in range(len(rows))):
        after = rows[k]
        for i, row in enumerate(rows):
            if row & bit:
                rows[i] = row | after
    return rows


def cyclic(rows: list[int]) -> bool:
    return any(row >> i & 1 for i, row in enumerate(rows))


class Path:
    """The events of a program if these conditions hold, or do not."""

    def __init__(self, places: list[str], threads: list[list[Event]], holds: dict[str, bool]):
        self.places, self.holds = places, holds
        threads = [[e for e in thread if holds.get(e.guard, True)] for thread in threads]
        names = sorted({e.location for thread in threads for e in thread if e.memory})
        self.events = [Event(-1, "", "st", "weak", "", name, "0", "", "") for name in names]
        self.before = [0] * len(names)  # program order, by way of barriers, not closed yet
        self.po = [0] * len(names)  # program order of memory operations
        self.met: dict[tuple, list[int]] = {}  # a barrier's event, and the threads there
        for thread in threads:
            self.add_thread(thread, len(names))
        self.diverged = any(
            met != [t for t, other in enumerate(places) if other == place]
            for (place, _), (_, *met) in self.met.items()
        )
        self.static = closure(self.before)
        every = range(len(self.events))
        self.strong = [sum(self.morally_strong(i, j) << j for j in every) for i in every]
        self.by_register = {e.register: i for i, e in enumerate(self.events) if e.register}
        self.heads: dict[int, list[int]] = {}  # of release patterns, by their write
        self.tails: dict[int, list[int]] = {}  # of acquire patterns, by their read
        for i, j in itertools.product(every, every):
            self.add_pattern(i, j)

    def add_thread(self, thread: list[Event], inits: int) -> None:
        last, own, barriers = range(inits), [], 0
        for event in thread:
            at = len(self.events)
            if event.op == "bar":  # one event of all threads that meet
                barriers += 1
                met = self.met.setdefault((self.places[event.thread], barriers), [at])
                met.append(event.thread)
                at = met[0]
            if at == len(self.events):
                self.events.append(event)
                self.before.append(0)
                self.po.append(0)
            for i in last:
                self.before[i] |= 1 << at
            last = [at]
            if event.op != "bar":
                for i in own:
                    self.po[i] |= 1 << at
                own.append(at)

    def includes(self, event: Event, thread: int) -> bool:  # 8.5
        same = self.places[event.thread] == self.places[thread]
        return event.scope == "gpu" or event.scope == "cta" and same

    def morally_strong(self, i: int, j: int) -> bool:  # 8.7
        a, b = self.events[i], self.events[j]
        if i == j or a.memory and b.memory and a.location != b.location:
            return False
        if (self.po[i] >> j | self.po[j] >> i) & 1:
            return True
        return self.includes(a, b.thread) and self.includes(b, a.thread)

    def add_pattern(self, i: int, j: int) -> None:  # 8.8
        access, other = self.events[i], self.events[j]
        if access.memory and access.scope and other.location == access.location:
            if access.writes and other.releases and (i == j or self.po[j] >> i & 1):
                self.heads.setdefault(i, []).append(j)
            if access.reads and other.acquires and (i == j or self.po[i] >> j & 1):
                self.tails.setdefault(i, []).append(j)

    def value(self, at: int, written: bool, rf: dict[int, int], known: dict) -> int | None:
        """What an event reads or writes; None: not known yet. No Thin Air (8.10.4): a value that
        depends on itself, by reads, operands and guards, is a LookupError."""
        key = at, written
        if key in known:
            if known[key] == "begun":
                raise LookupError
            return known[key]
        known[key] = "begun"
        event = self.events[at]
        if event.guard:
            self.value(self.by_register[condition(event.guard)[0]], False, rf, known)
        if not written:
            result = self.value(rf[at], True, rf, known) if at in rf else None
        else:
            source = self.by_register.get(event.operand)
            result = int(event.operand) if source is None else self.value(source, False, rf, known)
            if event.op != "st":
                old = self.value(at, False, rf, known)
                result = None if old is None or result is None else old + result
        known[key] = result
        return result

    def sources(self, r: int) -> list[int]:
        """The writes that a read may read from, by what is in order in all executions."""
        location = self.events[r].location
        writes = [w for w, e in enumerate(self.events) if e.writes and e.location == location]
        return [
            w
            for w in writes
            if w != r
            and not self.static[r] >> w & 1
            and not any(self.static[w] >> v & self.static[v] >> r & 1 for v in writes)
        ]

    def shared(self, w: int, a: int, b: int) -> bool:
        """Whether two reads may be of one write. Two atomic operations may not, by Atomicity."""
        ordered = self.events[w].thread < 0 or self.strong[w] >> a & self.strong[w] >> b & 1
        atomic = self.events[a].writes and self.events[b].writes and self.strong[a] >> b & 1
        return not (ordered and atomic)

    def reads_from(self) -> Iterator[tuple[dict[int, int], dict]]:
        """Choices of a write for each read that fit the conditions, and all values."""
        needed = {condition(text)[0] for text, holds in self.holds.items() if holds}
        if not needed <= self.by_register.keys():
            return
        decides = {self.by_register.get(condition(text)[0]) for text in self.holds}
        reads = [i for i, e in enumerate(self.events) if e.reads]
        choices = [(r, self.sources(r)) for r in reads]
        choices.sort(key=lambda choice: (choice[0] not in decides, len(choice[1])))

        def extend(rf: dict[int, int]) -> Iterator[tuple[dict[int, int], dict]]:
            known: dict = {}
            try:
                for i, event in enumerate(self.events):
                    if event.memory:
                        self.value(i, event.writes, rf, known)
            except LookupError:
                return
            for text, holds in self.holds.items():
                name, fits = condition(text)
                value = known.get((self.by_register.get(name), False))
                if value is not None and fits(value) != holds:
                    return
            if len(rf) == len(choices):
                yield rf, known
                return
            r, writes = choices[len(rf)]
            for w in writes:
                if all(v != w or self.shared(w, r, other) for other, v in rf.items()):
                    yield from extend({**rf, r: w})

        yield from extend({})

    def executions(self) -> Iterator[Execution]:
        for rf, known in self.reads_from():
            observed = [0] * len(self.events)  # 8.9.2; what reads and writes is atomic
            for r, w in rf.items():
                observed[w] |= self.strong[w] & 1 << r
            observed = closure(observed)
            synchronized = self.before[:]  # 8.9.4
            for w, heads in self.heads.items():
                for r in bits(observed[w]):
                    for head, tail in itertools.product(heads, self.tails.get(r, ())):
                        synchronized[head] |= self.strong[head] & 1 << tail
            base = closure(synchronized)
            # Causality, 8.10.6: no read from a later write. (Only writes are observed.)
            if cyclic(base) or any(base[r] >> w & 1 for r, w in rf.items()):
                continue
            cause = base[:]  # 8.9.5
            for i, row in enumerate(observed):
                for z in bits(row):
                    cause[i] |= base[z]
            yield from self.ends(rf, known, cause)

    def coherence(self, location: str, rf: dict, cause: list[int]) -> Iterator[list[int]]:
        """The coherence orders of a location (8.9.6) that the axioms allow."""
        here = [i for i, e in enumerate(self.events) if e.memory and e.location == location]
        writes = [i for i in here if self.events[i].writes]
        mask = sum(1 << i for i in writes)

        def row(full: int) -> int:  # with the numbers of `here`
            return sum((full >> i & 1) << k for k, i in enumerate(here))

        def orders(co: list[int]) -> Iterator[list[int]]:
            co = closure(co)
            if cyclic(co):
                return
            for i, j in itertools.combinations(writes, 2):
                if self.strong[i] >> j & 1 and not (co[i] >> j | co[j] >> i) & 1:
                    for first, second in ((i, j), (j, i)):
                        more = co[:]
                        more[first] |= 1 << second
                        yield from orders(more)
                    return
            yield co

        # Coherence, 8.10.1.
        for co in orders([cause[i] & mask if i in writes else 0 for i in range(len(self.events))]):
            from_read = {r: co[w] & ~(1 << r) for r, w in rf.items() if r in here}
            # Causality, 8.10.6, and Atomicity, 8.10.3.
            if any(
                cause[w] >> r & 1 or self.events[r].writes and self.strong[r] >> w & co[w] >> r & 1
                for r, later in from_read.items()
                for w in bits(later)
            ):
                continue
            # Sequential Consistency Per Location, 8.10.5. The reading side of i is i + half.
            half, rows = len(here), [0] * (2 * len(here))
            for k, i in enumerate(here):
                later = row(self.po[i])
                later |= later << half
                rows[k] |= later | row(self.strong[i] & co[i])
                rows[k + half] |= later | row(self.strong[i] & from_read.get(i, 0)) | 1 << k
                if i in rf:
                    rows[here.index(rf[i])] |= (self.strong[rf[i]] >> i & 1) << k + half
            if not cyclic(closure(rows)):
                yield co

    def ends(self, rf: dict[int, int], known: dict, cause: list[int]) -> Iterator[Execution]:
        values: dict[str, set[int]] = {}
        for name in sorted({e.location for e in self.events if e.memory}):
            writes = [i for i, e in enumerate(self.events) if e.writes and e.location == name]
            orders = self.coherence(name, rf, cause)
            values[name] = {known[i, True] for co in orders for i in writes if not co[i]}
        registers = {name: known[i, False] for name, i in self.by_register.items()}
        flaw = "only some threads reach a barrier" if self.diverged else self.race(cause)
        texts = [f"{e.thread}: {e.text}" if e.text else "the beginning" for e in self.events]
        text = "\n".join(
            "    " + texts[i] + (f" <- {texts[rf[i]]}" if i in rf else "")
            for i, e in enumerate(self.events)
            if e.text
        )
        for last in itertools.product(*values.values()):
            yield Execution(registers, dict(zip(values, last)), flaw, text)

    def race(self, cause: list[int]) -> str:  # 8.7.1
        for (i, a), (j, b) in itertools.combinations(enumerate(self.events), 2):
            if a.memory and b.memory and a.location == b.location and (a.writes or b.writes):
                if not ((self.strong[i] | cause[i]) >> j | cause[j] >> i) & 1:
                    return f"a race: {a.thread}: {a.text}, {b.thread}: {b.text}"
        return ""


def executions(program: str) -> Iterator[Execution]:
    places, threads = [], []
    for number, thread in enumerate(re.split(r"\n(?=[A-Z]:)", program.strip())):
        place, text = thread.split(":")
        code = [re.sub(r"#\w+", "", part).strip() for part in re.split("[;\n]", text)]
        events = [parse(number, part) for part in code if part]
        places.append(place)
        threads.append(events)
    guards = sorted({event.guard for thread in threads for event in thread if event.guard})
    for outcome in itertools.product((True, False), repeat=len(guards)):
        yield from Path(places, threads, dict(zip(guards, outcome))).executions()


def find(program: str, outcome: str) -> Execution | None:
    """An execution with an outcome, in terms of registers and of what locations hold at the end."""
    unknown = dict.fromkeys(re.findall(r"[a-z]\w*", outcome))
    for execution in executions(program):
        if eval(outcome, {}, unknown | execution.memory | execution.registers):
            return execution
    return None
