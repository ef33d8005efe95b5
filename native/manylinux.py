"""Find the Linux systems that a compiled library runs on.

A wheel's platform tag promises a C library: ``manylinux_2_28_x86_64`` runs where glibc is 2.28 or
newer (PEP 600). The newest version among the symbols that the library asks for is what it needs.
"""

import platform
import re
import subprocess
from pathlib import Path

_OLDEST = 17
"""manylinux2014: what every supported distribution has."""

_MACHINES = {62: "x86_64", 183: "aarch64"}
"""``e_machine`` of an ELF file."""

_ALWAYS_THERE = {
    *(
        "libc.so.6",
        "libm.so.6",
        "ld-linux-x86-64.so.2",
        "ld-linux-aarch64.so.1",
        "libpthread.so.0",
        "libdl.so.2",
    ),
    *("libstdc++.so.6", "libgcc_s.so.1"),
}
"""Libraries that manylinux allows; one that needs another would have to bring it along."""


def platform_tag(library: Path) -> str:
    """Return the platform tag of a wheel with a library in it.

    Returns:
        ``manylinux_2_N_arch``, or ``linux_arch`` where nothing can be promised: no binutils, no
        glibc, or other libraries needed.
    """
    machine = machine_of(library)
    try:
        listing = _list_symbols(library, machine)
    except (OSError, subprocess.CalledProcessError):
        return f"linux_{machine}"
    needed = set(re.findall(r"NEEDED\s+(\S+)", listing))
    versions = [int(minor) for minor in re.findall(r"GLIBC_2\.(\d+)", listing)]
    if not versions or not needed <= _ALWAYS_THERE:
        return f"linux_{machine}"
    return f"manylinux_2_{max(_OLDEST, *versions)}_{machine}"


def machine_of(library: Path) -> str:
    """Return the processor that a library was compiled for, which may be another than this one."""
    header = library.read_bytes()[:20]
    code = int.from_bytes(header[18:20], "little") if header[:4] == b"\x7fELF" else 0
    return _MACHINES.get(code, platform.machine())


def _list_symbols(library: Path, machine: str) -> str:
    prefix = "" if machine == platform.machine() else f"{machine}-linux-gnu-"
    command = [f"{prefix}objdump", "--private-headers", "--dynamic-syms", str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
