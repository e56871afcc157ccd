"""Seeds of the campaigns that `make` runs beside `make test`, such as `make jobs JOBS=300:320`."""

from __future__ import annotations

import os


def seeds(name: str) -> range | None:
    """Returns the seeds that were asked for, by `GOCKPT_<name>=<from>:<to>`; None if none were."""
    asked = os.environ.get(f"GOCKPT_{name}")
    return range(*map(int, asked.split(":"))) if asked else None


def number(name: str) -> int | None:
    """Returns how many were asked for, by `GOCKPT_<name>=<number>`; None if nobody asked."""
    asked = os.environ.get(f"GOCKPT_{name}")
    return int(asked) if asked else None
