"""What the examples' command lines accept."""

import argparse
from collections.abc import Callable


def at_least(least: int) -> Callable[[str], int]:
    """Return a type for `add_argument`: a whole number that is not below `least`."""

    def parse(text: str) -> int:
        number = int(text) if text.lstrip("+-").isdecimal() else None
        if number is None or number < least:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least} on, got {text}")
        return number

    return parse
