"""Selects the files of ostinato-core: those that need only NumPy."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LEFT_OUT = (
    *("runner", "engine", "server", "cli", "lab", "labs", "models", "plugins", "traces"),
    *("protocol", "testing", "router", "images", "tiers", "lora"),
    *("inputs.py", "ray.py", "sampling_params.py"),
)
"""Rooms and files that need more than NumPy: torch, FastAPI, msgspec, aiohttp, matplotlib."""

KEPT = tuple(f"tiers/{name}.py" for name in ("__init__", "port", "prefix", "retention"))
"""Files of these rooms that others need: receipts of an erasure name tiers."""


class CoreFiles(BuildHookInterface):
    """Adds the files to the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Map each file to its path in the wheel."""
        package = Path(self.root, "../../src/ostinato").resolve()
        for path in (*package.rglob("*.py"), package / "py.typed"):
            name = path.relative_to(package)
            is_left_out = any(name.is_relative_to(part) for part in LEFT_OUT)
            if not is_left_out or str(name) in KEPT:
                build_data["force_include"][str(path)] = f"ostinato/{name}"
        licence = Path(self.root, "../../LICENSE").resolve()
        build_data["extra_metadata"][str(licence)] = "LICENSE"
