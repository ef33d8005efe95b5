"""The folder of a report."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from ostinato.core.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
        raise _unwritable(out, error) from error


def write_folder(out: Path, plots: "Mapping[str, Figure]", page: str) -> None:
    """Write plots, by the name of their files, and the page; list the files on stderr.

    Raises:
        ConfigError: They cannot be written there.
    """
    from ostinato.lab.simulate.plots import save

    report = out / "report.html"
    try:
        written = [path for name, figure in plots.items() for path in save(figure, out / name)]
        report.write_text(page, encoding="utf-8")
    except OSError as error:
        raise _unwritable(out, error) from error
    names = ", ".join(path.name for path in (*written, report))
    Console(stderr=True).print(f"Written to {out}: {names}", style="dim", markup=False)


def _unwritable(out: Path, error: OSError) -> ConfigError:
    reason = "is no folder" if isinstance(error, FileExistsError) else error.strerror or error
    return ConfigError(f"out={str(out)!r}: {reason}; choose another folder")
