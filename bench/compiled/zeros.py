"""What NumPy makes otherwise of zeros below zero than programs of XLA's CPU backend do."""

from typing import Any

import numpy as np


def maximum(x: Any, y: Any) -> Any:
    """The larger of two, to which 0.0 is larger than -0.0."""
    largest = np.maximum(x, y)
    return largest if _is_whole(largest) else np.where((largest == 0) & (x == y), x + y, largest)


def minimum(x: Any, y: Any) -> Any:
    """The smaller of two, likewise."""
    smallest = np.minimum(x, y)
    return smallest if _is_whole(smallest) else -maximum(-x, -y)


def sign(x: Any) -> Any:
    """The sign of a number; of a zero it is that zero."""
    return np.sign(x) if _is_whole(x) else np.where(x == 0, x, np.sign(x))


def _is_whole(x: Any) -> bool:
    return np.asarray(x).dtype.kind in "biu"
