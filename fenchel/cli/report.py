"""fenchel report: the page of a run directory, made again."""

from pathlib import Path


def run(directory: Path, /) -> int:
    """Make the page of a run directory again.

    Parameters
    ----------
    directory
        A run directory; an interrupted or running one gives the page of what is there.
    """
    from fenchel.report import page

    path = page(directory)
    print(f"{path}  {path.stat().st_size / 2**20:.1f} MiB, nothing from outside")
    return 0
