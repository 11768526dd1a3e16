"""Amounts as people read them. Owns: their units. Refuses to know: what is counted."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(count: float) -> str:
    """Bytes in the largest unit that leaves at least 1."""
    units = iter(_UNITS)
    unit = next(units)
    while abs(count) >= 1024 and unit != _UNITS[-1]:
        count, unit = count / 1024, next(units)
    return f"{count:.0f} {unit}" if unit == _UNITS[0] else f"{count:,.2f} {unit}"
