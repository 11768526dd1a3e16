"""Numbers written for people.

Always holds: at most four significant digits, the unit when there is one, "–" for a missing number.
"""

from meshloom.observe.names import Unit

MISSING = "–"


def number_text(value: float | None, unit: Unit = Unit.NONE) -> str:
    """A metric's value with its unit, such as ``93.1 %``, ``1.8 GiB``, ``12.4k tokens/s``."""
    if value is None:
        return MISSING
    match unit:
        case Unit.SHARE:
            return percent_text(value)
        case Unit.BYTES:
            return bytes_text(value)
        case Unit.SECONDS:
            return seconds_text(value)
        case Unit.RATE:
            return f"{value:.3g}"
        case Unit.TOKENS_PER_SECOND:
            return f"{short_text(value)} tokens/s"
        case _:
            return short_text(value)


def percent_text(value: float) -> str:
    """A share in percent with one digit after the point."""
    return f"{100 * value:.1f} %"


def short_text(value: float) -> str:
    """Three or four significant digits; thousands as k, millions as M, billions as G; tiny numbers with an exponent."""
    size = abs(value)
    # Each bound is where three digits of the unit below would round to 1000 of it.
    for least, factor, letter in ((999.5e6, 1e9, "G"), (999.5e3, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= least:
            scaled = value / factor
            return f"{scaled:.0f}{letter}" if abs(scaled) >= 999.5 else f"{scaled:.3g}{letter}"
    if value == int(value):
        return str(int(value))
    if size >= 100:
        return f"{value:.0f}"
    if size >= 0.001:
        return f"{value:.3g}"
    return f"{value:.1e}"


def bytes_text(value: float) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def seconds_text(value: float) -> str:
    """A duration in its two largest units."""
    if value < 0.0995:
        return f"{value * 1000:.0f} ms"
    if value < 59.95:
        return f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    return f"{hours // 24} d {hours % 24:02d} h"


def plural(count: int, noun: str) -> str:
    """``1 step``, ``2,000 steps``."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
