"""What chips send each other in a compiled program, and the cycles that its compiler expects, read off the program's text.

Every instruction counts as often as it runs: loops count up to a constant, and of a conditional's branches the dearest one counts. Sent
bytes are those of the ring algorithms, which no other can beat: of n chips each sends a gathered array's other n - 1 parts on, and a sum
is a scatter of partial sums and a gather behind it.
"""

import math
import re
from collections import Counter
from collections.abc import Callable

from experiments.hlo_text import BITS, Instruction, computations

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")

_SHAPE = re.compile(r"\b(\w+)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(calls|body|condition|true_computation|false_computation)=(%[\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


Found = dict[tuple[str, ...], tuple[str, int]]
"""What was counted: by where it stands, under which name and how much. A collective that several kernels advance stands in all of them
under one channel, and counts once."""


def collective_bytes(program: str) -> dict[str, int]:
    """Bytes that a chip sends over the interconnect in one run of a compiled program, by kind of collective.

    Args:
      program: `compiled.as_text()`.

    Raises:
      ValueError: there is a collective in a loop that does not count up to a constant, or no entry.
    """
    totals: Counter[str] = Counter()
    for kind, sent in _counted(program, _sent).values():
        totals[kind] += sent
    return dict(sorted(totals.items()))


def estimated_cycles(program: str) -> int:
    """Cycles that a TPU's compiler expects of one run, kernel by kernel: no transfer is waited for. Errors as in `collective_bytes`."""

    def cycles(instruction: Instruction) -> Found:
        stated = re.search(r'"estimated_cycles":"(\d+)"', instruction.rest)
        return {(instruction.name,): ("cycles", int(stated[1]))} if stated else {}

    return sum(each for _, each in _counted(program, cycles).values())


def _counted(program: str, count: Callable[[Instruction], Found]) -> Found:
    """What all instructions that run come to, each as often as it does."""
    instructions, entry = computations(program)
    known: dict[str, Found] = {}

    def total(name: str) -> Found:
        if name not in known:
            known[name] = {}
            for each in instructions.get(name, []):
                known[name] |= of(each)
        return known[name]

    def of(instruction: Instruction) -> Found:
        own, rest = count(instruction), instruction.rest
        called = _CALLED.findall(rest)
        branches = [name for part, name in called if part.endswith("_computation")]
        if listed := _BRANCHES.search(rest):
            branches = re.findall(r"%[\w.\-]+", listed[1])
        if branches:
            return own | max(map(total, branches), key=lambda found: sum(each for _, each in found.values()))
        inside: Found = {}
        for _, name in called:
            inside |= total(name)
        if instruction.operation != "while" or not inside:
            # What a kernel's cycles are made of is stated once, for the kernel.
            return own if own and instruction.operation == "fusion" else own | inside
        passes = _passes(*(instructions[dict(called)[part]] for part in ("condition", "body")))
        return own | {(instruction.name, *place): (name, passes * each) for place, (name, each) in inside.items()}

    return total(entry)


def _passes(condition: list[Instruction], body: list[Instruction]) -> int:
    """How often a loop is passed that counts from 0 while it is less than a constant."""
    constants = [each for each in condition + body if each.operation == "constant"]
    numbers = {each.name: int(stated[1]) for each in constants if (stated := re.match(r"(\d+)\)", each.rest))}
    compared = next((each for each in condition if each.is_root and each.operation == "compare" and "direction=LT" in each.rest), None)
    if compared is not None:
        counter, limit = compared.operands
        place = next((re.search(r"index=(\d+)", each.rest) for each in condition if each.name == counter), None)
        following = next((each.operands for each in body if each.is_root and each.operation == "tuple"), [])
        if place is not None and limit in numbers and int(place[1]) < len(following):
            added = next((each for each in body if each.name == following[int(place[1])] and each.operation == "add"), None)
            steps = [numbers[name] for name in added.operands if name in numbers] if added else []
            if len(steps) == 1:
                return -(-numbers[limit] // steps[0])
    raise ValueError("program has a loop that does not count up to a constant; allowed are loops of known length")


def _sent(instruction: Instruction) -> Found:
    kind = instruction.operation.removesuffix("-start")
    if kind not in COLLECTIVES:
        return {}
    sizes = [_bytes(*shape) for shape in _SHAPE.findall(instruction.results) if shape[0] in BITS]
    if instruction.operation.endswith("-start") and kind in ("all-gather", "collective-permute"):
        # Operands first, then results; two counters of the device at the end of a permutation.
        sizes = [max(sizes)] if kind == "collective-permute" else sizes[len(sizes) // 2 :]
    size, chips = sum(sizes), _group_size(instruction.rest)
    share = (chips - 1) / chips
    factor = {"all-reduce": 2 * share, "reduce-scatter": chips - 1, "collective-permute": 1}.get(kind, share)
    channel = re.search(r"channel_id=(\d+)", instruction.rest)
    return {(channel[1] if channel else instruction.name,): (kind, math.ceil(size * factor))}


def _group_size(rest: str) -> int:
    """Chips that take part in a collective together, from any of the three ways in which groups are written."""
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\([^{]*\))? \{([^}]*)\}", rest):
        sizes = dict(re.findall(r"('\w+')=(\d+)", named[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'\w+'", named[2]))
    if counted := re.search(r"replica_groups=\[\d+,(\d+)\]", rest):
        return int(counted[1])
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", rest)
    return len(listed[1].split(",")) if listed else 1


def _bytes(kind: str, dimensions: str) -> int:
    return -(-BITS[kind] * math.prod(int(size) for size in dimensions.split(",") if size) // 8)
