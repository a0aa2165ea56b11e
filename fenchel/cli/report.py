"""fenchel report: writes the page of a run directory again."""

from pathlib import Path

from fenchel.files import printable


def run(directory: Path, /) -> int:
    """Write the page of a run directory again.

    Parameters
    ----------
    directory
        A run directory; of an unfinished run, the page shows what exists.
    """
    from fenchel.report import page

    path = page(directory)
    print(f"{printable(path, 4096)}  {path.stat().st_size / 2**20:.1f} MiB, self-contained")
    return 0
