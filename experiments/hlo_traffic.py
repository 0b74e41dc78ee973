"""Bytes that a compiled program moves between a TPU's main memory and its chip, read off the program's text.

`cost_analysis` counts every operand and result of every instruction, those that lie in on-chip memory included, and counts a weight
twice that is first copied there: several times what really goes over the memory bus. In the text of the compiled program every shape
says where it lies (`S(1)` is on-chip, no mark is main memory), so that the rest can be told apart.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from experiments.hlo_text import BITS, Instruction, computations

# They name data or wait for a transfer that was counted where it was started.
MOVES_NOTHING = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota", "after-all", "partition-id"),
    *("copy-done", "slice-done", "async-done"),
}

_SHAPE = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")


@dataclass(frozen=True)
class _Buffer:
    size: int
    in_main_memory: bool


def main_memory_bytes(program: str, apart: Callable[[Sequence[int]], bool] = lambda shape: False) -> int:
    """Bytes read from and written to main memory by one run of a compiled program.

    A gather reads no more than it gives; a scatter or an update in place moves its updates alone, unless the compiler copies the
    whole array, which is an instruction of its own. A kernel moves what its cost estimate says. What a fusion's operands are used for
    is not looked into otherwise.

    Args:
      program: `compiled.as_text()`.
      apart: tells by its shape whether an array is counted elsewhere; it then counts as nothing here, whatever reads or writes it.

    Raises:
      ValueError: there is a loop in it, whose passes the text does not number, or no entry.
    """
    instructions, entry = computations(program)
    buffers = {each.name: _buffers(each.results, apart) for each in instructions[entry]}
    total = 0
    for each in instructions[entry]:
        if each.operation == "while":
            raise ValueError("program has a while loop; allowed are programs whose loops are unrolled")
        if each.operation not in MOVES_NOTHING:
            operands = [buffer for name in each.operands for buffer in buffers.get(name, [])]
            total += _moved(each, buffers[each.name], operands, instructions)
    return total


def _moved(instruction: Instruction, results: list[_Buffer], operands: list[_Buffer], instructions: dict[str, list[Instruction]]) -> int:
    if stated := re.search(r'"cost_estimate":\{[^}]*"bytes_accessed":"(\d+)"', instruction.rest):
        # A kernel may read rows of an operand, or the whole several times: it says itself how much.
        return int(stated[1])
    if instruction.operation == "copy-start":
        return _in_main_memory(results[:2])
    if instruction.operation == "slice-start":
        source, part = results[:2]
        return part.size * (source.in_main_memory + part.in_main_memory) if source.size else 0
    called = re.search(r"calls=(%[\w.\-]+)", instruction.rest)
    inside = {each.operation for each in instructions.get(called.group(1), [])} if called else {instruction.operation}
    if inside & {"scatter", "dynamic-update-slice"}:
        whole = max((each.size for each in results), default=0)
        updates = [each for each in operands if each.size != whole]
        return 2 * _in_main_memory(updates) + _in_main_memory([each for each in results if each.size != whole])
    if inside & {"gather", "dynamic-slice"}:
        given = sum(each.size for each in results)
        operands = [_Buffer(min(each.size, given), each.in_main_memory) for each in operands]
    return _in_main_memory(results) + _in_main_memory(operands)


def _in_main_memory(buffers: list[_Buffer]) -> int:
    return sum(each.size for each in buffers if each.in_main_memory)


def _buffers(shape: str, apart: Callable[[Sequence[int]], bool]) -> list[_Buffer]:
    found = []
    for kind, dimensions, layout in _SHAPE.findall(shape):
        if kind in BITS:
            sizes = [int(size) for size in dimensions.split(",") if size]
            size = 0 if apart(sizes) else -(-BITS[kind] * math.prod(_padded(sizes, layout)) // 8)
            found.append(_Buffer(size, "S(" not in layout))
    return found


def _padded(sizes: list[int], layout: str) -> list[int]:
    """Dimensions as they lie in memory, rounded up to whole tiles; the first tile of the layout is the outer one."""
    tiled = re.match(r"\{([\d,]+):T\(([\d,]+)\)", layout)
    if tiled is None:
        return sizes
    minor_to_major, tile = ([int(each) for each in group.split(",")] for group in tiled.groups())
    padded = list(sizes)
    for dimension, size in zip(minor_to_major, reversed(tile), strict=False):
        padded[dimension] = -(-padded[dimension] // size) * size
    return padded
