"""What became of a save."""

import dataclasses
from typing import Literal

SaveKind = Literal["window", "snapshot", "skipped", "superseded"]
_DONE: dict[SaveKind, str] = {
    "window": "saved", "snapshot": "saved", "skipped": "not saved", "superseded": "not saved",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditFigures:
    """What a comparison of replayed chunks with the device's own has shown.

    The same figures are in the checkpoint's custom metadata, under `gockpt_jax`, `audit`.

    Attributes:
      chunks: Boxes that were compared.
      compared_bytes: Their bytes.
      max_ulps: Largest difference of an element, in units in the last place.
      max_relative_error: Largest absolute difference over the largest magnitude of its leaf (of the
        shard in which it was found).
      worst_leaf: Path of the leaf with the largest difference; `None` if there was none.
    """

    chunks: int = 0
    compared_bytes: int = 0
    max_ulps: int = 0
    max_relative_error: float = 0.0
    worst_leaf: str | None = None

    def plus(self, other: "AuditFigures | None") -> "AuditFigures":
        """The figures of both."""
        if other is None:
            return self
        worse = other if other.max_ulps > self.max_ulps else self
        return AuditFigures(
            chunks=self.chunks + other.chunks,
            compared_bytes=self.compared_bytes + other.compared_bytes,
            max_ulps=worse.max_ulps,
            max_relative_error=max(self.max_relative_error, other.max_relative_error),
            worst_leaf=worse.worst_leaf,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveReport:
    """One save, once it is known what became of it.

    Attributes:
      step: The label passed to `save`.
      kind: `"window"`: parts left over several steps. `"snapshot"`: all left at the save step.
        `"skipped"`: there is no such checkpoint, as `on_busy="skip"` asks for. `"superseded"`: nor
        is there, for a newer save came while its state waited, as `on_busy="newest"` asks for.
      reason: Why it was that kind, in words.
      window_steps: K; 1 for a snapshot.
      deferred_steps: Steps for which its window found no room in the host budget, and did not open.
      state_bytes: Bytes that this process wrote or replayed of the state. Of `jax.Array`s, here and
        in `written_bytes`: what else is in it (NumPy's arrays, numbers, texts) stock's handlers
        write, and nobody counts.
      early_bytes: Those of them that left before the save step and were replayed.
      gradient_bytes: Bytes of retained values that followed them.
      late_leaves: Of each group (leaves that are updated together) that was planned early and
        became late, the path of the leaf that it was found at, and the reason.
      stall_secs: Time the trainer's thread spent in our hooks during the window and in `save`,
        waits for budgets, barriers and the previous save included. Device contention is not in it:
        step-time inflation, which a benchmark measures, is the whole cost.
      barrier_secs: The part of it in `save` before the state was looked at: waiting for the
        previous save and for the other processes.
      waiting_secs: From there until the save was handed to Orbax, where it had to wait for the
        previous one (`on_busy="newest"`).
      drain_secs: From the seal until the last chunk was final on the host.
      write_secs: Time in which at least one chunk was being written, or files were being synced;
        not that in which the writer had none to write. Of several items, the longest.
      commit_secs: From the end of the last write until the checkpoint was visible.
      written_bytes: Bytes of the chunks that this process wrote, before compression.
      peak_host_bytes: Most bytes that saves held on the host at once, from this one's beginning to
        its end: chunks, retained values, and what replay, audit and writer take beside them. Other
        saves' bytes are in it.
      host_budget_bytes: What they were allowed when the state was taken.
      peak_device_bytes: Most bytes staged and retained on one device at once, by our accounting.
      audit: What was compared with the device; `None` if nothing was replayed, or without audit.
      error: What failed, in words; `None` for a committed checkpoint. One that had failed on this
        process before it was superseded is `"superseded"`, as on the others, and has this, too.

    Example:
      >>> print(SaveReport(step=7, kind="snapshot", reason="forced", window_steps=1))
      step 7 saved: snapshot, K=1 (forced), 0.0 MB, stall 0.0 ms, drain 0.00 s, write 0.00 s
    """

    step: int
    kind: SaveKind
    reason: str
    window_steps: int
    deferred_steps: int = 0
    state_bytes: int = 0
    early_bytes: int = 0
    gradient_bytes: int = 0
    late_leaves: tuple[str, ...] = ()
    stall_secs: float = 0.0
    barrier_secs: float = 0.0
    waiting_secs: float = 0.0
    drain_secs: float = 0.0
    write_secs: float = 0.0
    commit_secs: float = 0.0
    written_bytes: int = 0
    peak_host_bytes: int = 0
    host_budget_bytes: int | None = None
    peak_device_bytes: int = 0
    audit: AuditFigures | None = None
    error: str | None = None

    def __str__(self) -> str:
        """One line of it, as it is logged; its `repr` has everything."""
        became = _DONE[self.kind] if self.error is None else f"failed with {self.error}"
        line = (
            f"step {self.step} {became}: {self.kind}, K={self.window_steps} ({self.reason}), "
            f"{self.state_bytes / 1e6:.1f} MB, stall {self.stall_secs * 1e3:.1f} ms, "
            f"drain {self.drain_secs:.2f} s, write {self.write_secs:.2f} s"
        )
        return " ".join(line.split())  # some errors tell of each leaf in a line of its own
