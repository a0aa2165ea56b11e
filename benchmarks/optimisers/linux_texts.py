"""Two texts from Debian's package of the Linux sources: C, and the prose of its documentation.

    apt-get download linux-source-6.1
    python -m benchmarks.optimisers.linux_texts linux-source-6.1_*.deb

writes linux_c.xz (files .c, 50 MB) and linux_rst.xz (files .rst below Documentation, all or 50 MB)
to benchmarks/texts, which git ignores, and prints the beginning of their SHA-256. It takes one or
two minutes. The studies of ``fenchel bench optim`` read the two files as the texts "c" and "rst".

A text is the first ``limit`` bytes of its files in the order of the SHA-256 of their paths, each
followed by a newline: neighbours in the tree are far apart, and the held-out end has the mixture of
the beginning. The package is an archive of ar, with data.tar.xz, with the tar.xz of the sources;
it is read as a stream, and no file is written but the two texts. Other versions of the package
give other texts; results carry their hash.
"""

import argparse
import hashlib
import heapq
import lzma
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

FOLDER = Path(__file__).parents[1] / "texts"
LIMIT = 50_000_000
LARGEST_FILE = 4_000_000
"""Larger files are tables of registers, and are left out."""


class FirstFiles:
    """The files of smallest hash, as many as fill ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit, self.size = limit, 0
        self.heap: list[tuple[int, str, bytes]] = []

    def add(self, path: str, content: bytes) -> None:
        """Consider a file."""
        rank = -int.from_bytes(hashlib.sha256(path.encode()).digest(), "big")
        heapq.heappush(self.heap, (rank, path, content))
        self.size += len(content) + 1
        while self.size - len(self.heap[0][2]) - 1 >= self.limit:  # still full without the last
            self.size -= len(heapq.heappop(self.heap)[2]) + 1

    def text(self) -> bytes:
        """Their contents in order."""
        return b"".join(c + b"\n" for _, _, c in sorted(self.heap, reverse=True))[: self.limit]


def read_texts(package: Path, limit: int = LIMIT) -> dict[str, bytes]:
    """The texts of a package by name."""
    chosen = {"linux_c": FirstFiles(limit), "linux_rst": FirstFiles(limit)}
    for path, content in source_files(package):
        if path.endswith(".c"):
            chosen["linux_c"].add(path, content)
        elif path.startswith("Documentation/") and path.endswith(".rst"):
            chosen["linux_rst"].add(path, content)
    return {name: files.text() for name, files in chosen.items()}


def source_files(package: Path) -> Iterator[tuple[str, bytes]]:
    """Paths below the top folder of the sources, and contents, of files that are not too large."""
    with (
        package.open("rb") as archive,
        tarfile.open(fileobj=_data_of(archive, package), mode="r|xz") as data,
    ):
        for outer in data:
            if not (outer.isfile() and outer.name.endswith(".tar.xz")):
                continue
            inner = data.extractfile(outer)
            assert inner is not None  # it is a file
            with tarfile.open(fileobj=inner, mode="r|xz") as sources:
                for member in sources:
                    if member.isfile() and member.size <= LARGEST_FILE:
                        file = sources.extractfile(member)
                        assert file is not None
                        yield member.name.partition("/")[2], file.read()
            return
    raise ValueError(f"{package} has no sources, a file .tar.xz; is it a linux-source package?")


def _data_of(archive: IO[bytes], package: Path) -> IO[bytes]:
    """The archive at the beginning of its data.tar.xz, which is the last part of a package."""
    if archive.read(8) != b"!<arch>\n":
        raise ValueError(f"{package} is not a Debian package.")
    while len(header := archive.read(60)) == 60:
        if header.startswith(b"data.tar.xz"):
            return archive
        size = int(header[48:58])
        archive.seek(size + size % 2, 1)
    raise ValueError(f"{package} has no data.tar.xz.")


def main(options: Sequence[str] | None = None) -> None:
    """Write the texts of a package."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("package", type=Path, help="linux-source-VERSION.deb")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--bytes", type=int, default=LIMIT, help="the most of each text")
    arguments = parser.parse_args(options)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name, text in read_texts(arguments.package, arguments.bytes).items():
        path = arguments.folder / f"{name}.xz"
        path.write_bytes(lzma.compress(text))
        print(f"{path}: {len(text):,} bytes, SHA-256 {hashlib.sha256(text).hexdigest()[:12]}")


if __name__ == "__main__":
    main()
