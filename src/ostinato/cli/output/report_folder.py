"""The folder of a report."""

from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

from ostinato.core.errors import ConfigError


def open_folder(out: Path | None) -> None:
    """Create the folder of a report, before the work for it.

    Raises:
        ConfigError: Nothing can be written there.
    """
    if out is None:
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / "report.html"
        is_new = not probe.exists()
        probe.open("ab").close()
        if is_new:
            probe.unlink()
    except OSError as error:
        raise unwritable(out, error) from error


def unwritable(out: Path, error: OSError) -> ConfigError:
    """Return the error for a folder that is not writable."""
    reason = "is no folder" if isinstance(error, FileExistsError) else error.strerror or error
    return ConfigError(f"out={str(out)!r}: {reason}; choose another folder")


def list_written(out: Path, paths: Iterable[Path]) -> None:
    """List the written files on stderr."""
    names = ", ".join(path.name for path in paths)
    Console(stderr=True).print(f"Written to {out}: {names}", style="dim", markup=False)
