"""Models and texts of the studies: a small model for a CPU, one of 25M parameters for a GPU.

    quick   two steps per run, a check that everything works
    cpu     the small model, about a quarter of an hour on two cores
    full    the same, trained twice as long, more rates and five seeds: some hours on one core
    cuda    25M parameters, 8 layers of width 512 at context 512, 6.6M bytes per run: less than
            one epoch, since a model of this size memorises the text within a few
    small   the small model on one thread, for the contest: a few minutes of an idle core
    2m      1.8M parameters, 4 layers of width 192 at context 128, on one thread, for the contest:
            hours of one core
    gpt2    the blocks of GPT-2 of 124M, which with bytes for tokens are 85M parameters, at context
            1024; for the study of lengths

Runs of 8,000 steps at 25M have a quarter of the batch: they read the 33M bytes that 2,000 steps
read, four epochs of the prose, so that no length is a study of memorisation.

    sotu    messages of presidents, to train on
    kjv     the King James Bible, to fine-tune on
    code    Python sources of the standard library and of installed packages, in the order of the
            hash of their paths; what is installed differs, so results carry a hash of the text
    linux_c, linux_rst
            C and documentation of the Linux sources, from a package of Debian (linux_texts.py)

Bytes are the tokens, so that no tokenizer affects a comparison, and losses are in nats per byte.
The last 2 % of a text are for validation. The study of lengths neither trains nor is measured on
them: it trains on the first 96 % and is measured on the 2 % between, by whose loss no setting was
chosen (earlier studies have trained on that part of sotu).
"""

import hashlib
import lzma
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.optimisers.linux_texts import FOLDER
from fenchel.data import Ids, open_text
from fenchel.model import ModelConfig

VALIDATION = 0.02
CODE_BYTES = 2**27
"""The most bytes of source code that are read."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model, its training, and the extent of the studies at this size."""

    model: ModelConfig
    batch: int
    steps: int
    seeds: tuple[int, ...]
    """Fresh seeds of the tuned study; tuning itself uses seed 0."""
    device: str = "cpu"
    precision: str = "float32"
    scale: float = 1.0
    """Factor on the initial rates of the search (rules.py)."""
    copy_seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    copy_steps: int = 300
    max_rates: int = 7
    """The most learning rates tried per rule."""
    grid: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Values tried for each other field of a ``Job`` that a rule tunes."""
    validation: int = 2**16
    """Bytes of validation text."""
    bytes: int | None = None
    """Bytes used of each text; None uses all."""
    lengths: tuple[int, ...] = ()
    """Steps of the runs of the study of lengths; empty where it is not run."""
    length_batches: Mapping[int, int] = field(default_factory=dict)
    """Sequences per step, by steps, of its runs that differ in it from ``batch``."""
    rate_steps: int | None = None
    """Steps of the runs of the study of rates; None where it is not run."""
    rate_batch: int | None = None
    """Sequences per step of its runs; None is ``batch``."""
    length_seeds: tuple[int, ...] = (21, 22, 23)
    """Seeds of that study, of which no other has used any."""
    fixed: Mapping[str, float] = field(default_factory=dict)
    """Rate, decay and momentum of all its runs."""
    threads: int = 2
    """Threads of a run on a CPU."""
    contest: tuple[tuple[str, int, int], ...] = ()
    """Rows of the contest in their order: text, steps, and the most runs of the search there.
    Each search begins where that of the row before it ended; one of no runs takes its settings."""
    contest_from: tuple[str, str, int] | None = None
    """Size, text and steps of the row that the first one begins from."""
    contest_seeds: tuple[int, ...] = (31, 32, 33)
    """Seeds of the contest, of which no other study has used any; its search uses seed 0."""
    pace_steps: int = 20
    """Steps of a block whose time is measured: a multiple of what any rule does now and then."""


GRID = {
    "decay": (0.0, 0.1, 0.3, 1.0),
    "radius": (2.5, 4.0, 6.0, 12.0),
    "damping": (0.01, 0.1, 1.0, 3.0, 10.0),
    "change": (0.1, 0.2, 0.4),
    "momentum": (0.9, 0.95),
}

SMALL = ModelConfig(vocabulary=256, context=64, width=64, layers=3, heads=4)

SIZES = {
    "quick": Size(
        model=ModelConfig(vocabulary=256, context=16, width=16, layers=2, heads=2),
        batch=2,
        steps=2,
        seeds=(1,),
        copy_seeds=(0,),
        copy_steps=2,
        max_rates=1,
        validation=256,
        bytes=20_000,
        lengths=(2, 3),
        length_batches={3: 1},
        rate_steps=2,
        length_seeds=(21,),
        fixed={"rate": 0.02, "decay": 0.1, "momentum": 0.9},
        threads=1,
        contest=(("sotu", 2, 3), ("kjv", 3, 0)),
        contest_seeds=(31, 32),
        pace_steps=1,
    ),
    "2m": Size(
        model=ModelConfig(vocabulary=256, context=128, width=192, layers=4, heads=6),
        batch=8,
        steps=400,
        seeds=(1, 2),
        threads=1,
        contest=(("linux_c", 250, 7), ("linux_rst", 250, 0)),
        contest_seeds=(31, 32),
    ),
    "small": Size(
        model=SMALL,
        batch=16,
        steps=150,
        seeds=(1, 2),
        threads=1,
        contest=(("linux_c", 150, 5), ("linux_rst", 150, 0)),
        contest_seeds=(31, 32),
    ),
    "cpu": Size(
        model=SMALL,
        batch=16,
        steps=160,
        seeds=(1, 2),
        max_rates=4,
        grid={**GRID, "decay": (0.1, 0.3, 1.0)},
        copy_seeds=(0, 1, 2),
        lengths=(100, 400),
        length_seeds=(21, 22),
        fixed={"rate": 0.03, "decay": 0.3, "momentum": 0.9},
    ),
    "full": Size(
        model=SMALL,
        batch=16,
        steps=300,
        seeds=(1, 2, 3, 4, 5),
        grid=GRID,
        lengths=(100, 400, 1600),
        rate_steps=1600,
        fixed={"rate": 0.03, "decay": 0.3, "momentum": 0.9},
    ),
    "cuda": Size(
        model=ModelConfig(vocabulary=256, context=512, width=512, layers=8, heads=8),
        batch=32,
        steps=400,
        seeds=(1, 2, 3),
        device="cuda",
        precision="bfloat16",
        scale=2 / 9,
        max_rates=5,
        grid={**GRID, "decay": (0.1, 0.3)},
        copy_steps=600,
        validation=2**18,
        lengths=(400, 2000, 8000),
        length_batches={8000: 8},
        rate_steps=2000,
        rate_batch=8,
        fixed={"rate": 0.003, "decay": 0.3, "momentum": 0.9},
        contest=(("linux_c", 400, 12), ("linux_rst", 400, 0), ("linux_c", 2000, 3)),
    ),
    "gpt2": Size(
        model=ModelConfig(vocabulary=256, context=1024, width=768, layers=12, heads=12),
        batch=32,
        steps=400,
        seeds=(1, 2, 3),
        device="cuda",
        precision="bfloat16",
        scale=2 / 9,
        validation=2**18,
        lengths=(400, 2000),
        length_batches={2000: 8},
        length_seeds=(21,),
        fixed={"rate": 0.003, "decay": 0.3, "momentum": 0.9},
        contest=(("linux_c", 1000, 3),),
        contest_from=("cuda", "linux_c", 2000),
        contest_seeds=(31, 32),
    ),
}


@cache
def text(source: str, limit: int | None) -> tuple[Ids, Ids]:
    """Training bytes and validation bytes among the first ``limit`` of a text."""
    ids = np.frombuffer(_read(source, limit), dtype=np.uint8)[:limit]
    cut = int(len(ids) * (1.0 - VALIDATION))
    return ids[:cut], ids[cut:]


def fresh_text(source: str, limit: int | None) -> tuple[Ids, Ids]:
    """Training bytes, and the bytes between them and the validation bytes of ``text``."""
    ids, _ = text(source, limit)
    cut = int(len(ids) * (1.0 - VALIDATION / (1.0 - VALIDATION)))
    return ids[:cut], ids[cut:]


@cache
def text_hash(source: str, limit: int | None) -> str:
    """The beginning of the SHA-256 of all bytes of a text."""
    digest = hashlib.sha256()
    for part in text(source, limit):
        digest.update(part.tobytes())
    return digest.hexdigest()[:12]


def _read(source: str, limit: int | None) -> bytes:
    if source.startswith("linux_"):
        return _linux_text(source)
    if source == "code":
        roots = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}
        return python_sources(sorted(roots), CODE_BYTES if limit is None else limit)
    return "\n".join(document.text for document in open_text(source).documents()).encode()


def _linux_text(name: str) -> bytes:
    path = FOLDER / f"{name}.xz"
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is missing; benchmarks/optimisers/linux_texts.py says how to make it."
        )
    return lzma.decompress(path.read_bytes())


def python_sources(roots: Sequence[Path], limit: int) -> bytes:
    """At most ``limit`` bytes of the sources below ``roots``, each file by its path below one."""
    files = {
        hashlib.sha256(file.relative_to(root).as_posix().encode()).digest(): file
        for root in roots
        for file in root.rglob("*.py")
        if "site-packages" not in file.relative_to(root).parts  # below the standard library
    }
    parts, size = [], 0
    for _, file in sorted(files.items()):
        if size >= limit:
            break
        try:
            parts.append(file.read_bytes())
        except OSError:  # a broken link, or a file that may not be read
            continue
        size += len(parts[-1]) + 1
    return b"\n".join(parts)[:limit]
