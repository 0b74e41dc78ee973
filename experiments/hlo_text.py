"""Compiled programs as text: their computations and the instructions in them."""

import re
from dataclasses import dataclass

BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "bf16": 16, "f16": 16}
BITS |= {"s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64}

_INSTRUCTION = re.compile(r"^\s*(ROOT )?(%[\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?(%[\w.\-]+) \(.*\{$")


@dataclass(frozen=True)
class Instruction:
    """One line of a program.

    Attributes:
      is_root: whether it gives what its computation gives.
      results: their types.
      rest: the line from the operands on.
    """

    is_root: bool
    name: str
    results: str
    operation: str
    rest: str

    @property
    def operands(self) -> list[str]:
        """Names of the operands."""
        return re.findall(r"%[\w.\-]+", self.rest.split(")")[0])


def computations(program: str) -> tuple[dict[str, list[Instruction]], str]:
    """The instructions of every computation, and the name of the one that is the program.

    Args:
      program: `compiled.as_text()`.

    Raises:
      ValueError: there is no entry.
    """
    found: dict[str, list[Instruction]] = {}
    entry, current = None, None
    for line in program.splitlines():
        if head := _COMPUTATION.match(line):
            current = head.group(2)
            found[current] = []
            entry = current if head.group(1) else entry
        elif current is not None and (match := _INSTRUCTION.match(line)):
            root, *others = match.groups()
            found[current].append(Instruction(bool(root), *others))
    if entry is None:
        raise ValueError("program has no ENTRY; allowed is the text of a compiled program")
    return found, entry
