"""What a plan costs. Pure arithmetic: no arrays, no clock, no JAX."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What leaves as one, in bytes on the fullest device after replica splitting.

    Attributes:
      state_bytes: Staged and pulled when it leaves.
      retained_bytes: Pulled behind it after each later step of the window.
      after: Positions of units that must not leave later than it.
    """

    state_bytes: int
    retained_bytes: int
    after: tuple[int, ...] = ()
