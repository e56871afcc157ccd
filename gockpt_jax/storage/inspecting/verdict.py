"""What verifying has found in one directory of a checkpoint."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from gockpt_jax.errors import VerifyError

State = Literal["whole", "damaged", "unchecked"]

_MOST_LINES = 20
"""Where a file of many leaves is missing, each of them is a fault."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What was found in one item (or one step, for what lies beside its items).

    Attributes:
      path: The directory.
      state: `whole`: everything is as it was before it was written. `damaged`: see `faults`.
        `unchecked`: nothing is known to be wrong, but not everything has a checksum.
      faults: One line each; every one of them names a file, a leaf or a box.
      notes: What has no checksum, and why.
      chunks: Chunks that were read and digested.
      nbytes: Their bytes, before compression.
    """

    path: str
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    chunks: int = 0
    nbytes: int = 0

    @property
    def state(self) -> State:
        """See above."""
        if self.faults:
            return "damaged"
        return "unchecked" if self.notes else "whole"

    def require_whole(self) -> None:
        """Raises `error` unless the item is whole."""
        if self.state != "whole":
            raise self.error()

    def error(self) -> VerifyError:
        """What to raise where it is not whole: names its faults, the first ones of many."""
        lines = "".join(f"\n  {line}" for line in first_of(self.faults or self.notes))
        return VerifyError(
            f"{self.path} is {self.state}:{lines}\nRestore another step, or from a copy."
        )


def first_of(lines: Sequence[str]) -> list[str]:
    """As many faults or notes as a reader takes in, and how many more there are."""
    more = len(lines) - _MOST_LINES
    rest = [f"and {more} more: `gockpt_jax verify --json` names all"] if more > 0 else []
    return [*lines[:_MOST_LINES], *rest]
