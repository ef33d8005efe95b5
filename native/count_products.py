"""Counts products per instruction in the innermost loops of ARM's kernels.

Emulation says nothing of speed, so kernels are chosen by what a disassembly shows::

    python native/count_products.py BUILD/CMakeFiles/{codes,products}_neon*.dir/src/products/*.o

prints, for each file and each instruction that multiplies, the fewest and the most products per
instruction of a loop: loads, stores and the loop's own instructions included, and what comes at the
end of a group of inputs not.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PRODUCTS = {"smmla": 32, "usmmla": 32, "sdot": 16, "udot": 16, "bfmmla": 16, "bfdot": 8}
PRODUCTS |= {"smull": 4, "smull2": 4, "fmla": 4}
_LINE = re.compile(r"\s*([0-9a-f]+):\s+(\S+)\s*(.*)")
_BRANCHES = re.compile(r"b|b\..*|cbn?z|tbn?z")


def loops(function: str) -> Iterator[list[str]]:
    """Yield the instructions of loops without a branch inside."""
    lines = [match for line in function.splitlines() if (match := _LINE.match(line))]
    names, places = [line[2] for line in lines], {line[1]: i for i, line in enumerate(lines)}
    for last, line in enumerate(lines):
        target = re.search(r"([0-9a-f]+) <", line[3])
        if _BRANCHES.fullmatch(line[2]) and target and places.get(target[1], last + 1) <= last:
            body = names[places[target[1]] : last + 1]
            if not any(map(_BRANCHES.fullmatch, body[:-1])):
                yield body


def rates_of(file: Path) -> dict[str, tuple[float, float]]:
    """Return the fewest and the most products per instruction, by what multiplies."""
    command = ["aarch64-linux-gnu-objdump", "-d", "--no-show-raw-insn", str(file)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rates: dict[str, list[float]] = {}
    for function in re.split(r"\n(?=[0-9a-f]{16} <)", text):
        for body in loops(function):
            used = [name for name in body if name in PRODUCTS]
            if used:
                rate = sum(PRODUCTS[name] for name in used) / len(body)
                rates.setdefault(max(used, key=used.count), []).append(rate)
    return {name: (min(own), max(own)) for name, own in rates.items()}


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        for name, (lowest, highest) in rates_of(path).items():
            print(f"{path.parent.parent.stem:20} {name:8} {lowest:5.1f} .. {highest:4.1f}")
