"""What the name of a figure tells of it: units are in names."""

import re

_RATE = re.compile(r"per_sec|gbps|\brate\b")
_TIME_OR_RATE = re.compile(rf"secs|_(ms|us|ns)(\b|_per_)|{_RATE.pattern}")
_RELATIVE = re.compile(r"ratio|speedup|inflation|_over_|_vs_|ettr")
_COUNT_OR_SIZE = re.compile(
    r"_gib\b|_bytes\b|copies|collectives|instructions|chips|parts\b|joins|torn|perturbed|parameters_b"
    r"|fenced|max_ulps|differing|exact/failures|files_per_tb|/(early|late|otherwise|contracted)$"
)
_MEASURED_SIZE = re.compile(r"(rss|kept|accounted|extra)_bytes|resident_|peak_")
_HIGHER_IS_BETTER = re.compile(
    rf"speedup|throughput|bandwidth|ettr|overlap|(link|disk|raw)_ratio|{_RATE.pattern}"
)
_LOWER_IS_BETTER = re.compile(
    r"secs|_(ms|us|ns)(\b|_per_)|inflation|_memory_|rss|_gib\b|_bytes\b|drain|stall|copies"
    r"|collectives|instructions|staged|moved|_over_(copied|jit|accounted)|torn|perturbed|collections"
    r"|grown_old|fenced|max_ulps|differing|failures|files_per_tb|(read_bytes|call|back|budget|state)_ratio"
)
_YARDSTICK = re.compile(
    r"(^|/)(raw|raw_link_gbps|write_gbps|stock|stock_fastest|torch|copy|whole_tree|ideal|orbax_\w+"
    r"|device_copy\w*)(/|$)|_stock(_ms|_us)?$|^(step_call_ms|step_secs/alone)$"
    r"|^pull_gbps/(?!library/)"
    r"|resident_peak_bytes$"  # of a process that all modes share
)


def is_time_or_rate(name: str) -> bool:
    """Whether a figure is of a clock."""
    return bool(_TIME_OR_RATE.search(name))


def is_rate(name: str) -> bool:
    """Whether it is something per time."""
    return bool(_RATE.search(name))


def is_yardstick(name: str) -> bool:
    """Whether a figure is of what is measured beside this library, to hold it against."""
    return bool(_YARDSTICK.search(name))


def higher_is_better(name: str) -> bool | None:
    """Which way is better; `None` if the name does not say."""
    if _HIGHER_IS_BETTER.search(name):
        return True
    return False if _LOWER_IS_BETTER.search(name) else None


def travels(name: str) -> bool:
    """Whether a figure means the same on another machine; one of unknown unit does not."""
    if is_time_or_rate(name):
        return False
    return bool(_RELATIVE.search(name) or _COUNT_OR_SIZE.search(name))


def repeats(name: str) -> bool:
    """Whether another run would give the same number: counts and sizes, but not measured memory."""
    relative = _RELATIVE.search(name) and not name.endswith("_over_copied")
    if relative or is_time_or_rate(name) or _MEASURED_SIZE.search(name):
        return False
    return bool(_COUNT_OR_SIZE.search(name))
