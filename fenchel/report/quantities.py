"""Numbers as a person reads them, and as JSON may hold them."""

import math
from collections.abc import Iterable, Sequence

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"))


def figure(value: float | None, digits: int = 4) -> str:
    """The digits that matter.

    >>> figure(1.77489), figure(25465.3), figure(0.00012), figure(math.nan), figure(3.0)
    ('1.775', '25,465', '0.00012', 'nan', '3')
    """
    if value is None:
        return ""
    if not math.isfinite(value):
        return str(float(value))
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) < 1e-3 or abs(value) >= 1e15:
        return f"{value:.{digits - 1}g}"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:,.{min(max(decimals, 0), digits)}f}"


def amount(value: float) -> str:
    """A count, large ones with a prefix.

    >>> amount(950), amount(13572), amount(4_096_000)
    ('950', '13,572', '4.10 M')
    """
    for size, prefix in _PREFIXES:
        if math.isfinite(value) and abs(value) >= size:
            return f"{value / size:,.2f} {prefix}"
    return figure(value)


def duration(seconds: float) -> str:
    """A time in its two largest units.

    >>> duration(8.25), duration(161), duration(7384)
    ('8.2 s', '2 min 41 s', '2 h 3 min')
    """
    if not math.isfinite(seconds) or seconds < 0:
        return figure(seconds)
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min"


def many(count: int, word: str) -> str:
    """A count of things.

    >>> many(1, "head"), many(1200, "head")
    ('1 head', '1,200 heads')
    """
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def spoken(words: Sequence[str]) -> str:
    """A list as a sentence has it.

    >>> spoken(["a", "b", "c"]), spoken(["a"]), spoken([])
    ('a, b and c', 'a', '')
    """
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def plain(values: Iterable[float]) -> list[float | None]:
    """Six digits each, and None for what JSON has no number for.

    >>> plain([1 / 3, math.inf])
    [0.333333, None]
    """
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]
