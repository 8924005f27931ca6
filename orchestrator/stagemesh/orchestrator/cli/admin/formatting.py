"""Figures and times as people read them."""

_KIB = 1024
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86400


def size(size_bytes: float) -> str:
    """Bytes, with three digits or so: "17 B", "1.5 MiB"."""
    unit = 0
    while size_bytes >= _KIB and unit < len(_UNITS) - 1:
        size_bytes, unit = size_bytes / _KIB, unit + 1
    return f"{size_bytes:.0f} {_UNITS[unit]}" if unit == 0 or size_bytes >= 100 else f"{size_bytes:.1f} {_UNITS[unit]}"


def duration(seconds: float) -> str:
    """A length of time: "12 ms", "3.20 s", "4 m 05 s", "2 h 07 m", "3 d 04 h"."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < _MINUTE_S:
        return f"{seconds:.2f} s"
    for unit_s, unit, part_s, part in ((_DAY_S, "d", _HOUR_S, "h"), (_HOUR_S, "h", _MINUTE_S, "m")):
        if seconds >= unit_s:
            return f"{int(seconds // unit_s)} {unit} {int(seconds % unit_s // part_s):02} {part}"
    return f"{int(seconds // _MINUTE_S)} m {int(seconds % _MINUTE_S):02} s"


def rate(per_s: float) -> str:
    """Something a second: "0", "3.4", "120"."""
    return "0" if not per_s else f"{per_s:.1f}" if per_s < 100 else f"{per_s:,.0f}"
