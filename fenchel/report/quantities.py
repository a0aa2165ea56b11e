"""Numbers as a person reads them, and as JSON may hold them."""

import math
from collections.abc import Iterable

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"))


def figure(value: float | None, digits: int = 4) -> str:
    """Four digits that matter.

    >>> figure(1.77489), figure(1234567.0), figure(0.00012), figure(math.nan), figure(3)
    ('1.775', '1,234,567', '1.2e-04', 'nan', '3')
    """
    if value is None:
        return ""
    if not math.isfinite(value):
        return str(float(value))
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) < 1e-3 or abs(value) >= 1e15:
        return f"{value:.{digits - 1}g}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 4)}f}"


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
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min"


def spoken(words: Iterable[str]) -> str:
    """A list as a sentence has it.

    >>> spoken(["a", "b", "c"])
    'a, b and c'
    """
    *most, last = list(words) or [""]
    return f"{', '.join(most)} and {last}" if most else last


def plain(values: Iterable[float]) -> list[float | None]:
    """Six digits each, and None for what JSON has no number for.

    >>> plain([1 / 3, math.inf])
    [0.333333, None]
    """
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]
