"""The audit of a window: samples at the sealed version, against what replay made of them."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from gockpt_jax.checks import counted
from gockpt_jax.errors import AuditError
from gockpt_jax.options import Audit
from gockpt_jax.replay.ulps import UNEQUAL, Difference, difference, scale_of
from gockpt_jax.telemetry import events
from gockpt_jax.telemetry.report import AuditFigures
from gockpt_jax.telemetry.save_record import SaveRecord
from gockpt_jax.transfer.budget import ByteBudget, Loan
from gockpt_jax.transfer.pull import HostChunk
from gockpt_jax.transfer.replicas import Piece
from gockpt_jax.transfer.sample import (
    Grid,
    can_be_sampled,
    grid_at,
    in_batches,
    kind_of,
    sample_bytes,
    start_sample,
)
from gockpt_jax.transfer.turns import Turn, Turns
from gockpt_jax.window.landing import send
from gockpt_jax.window.resources import Resources
from gockpt_jax.window.worker import in_any_case


@dataclasses.dataclass(frozen=True, slots=True)
class _Box:
    """What is compared: of a leaf, of the n-th piece that this process writes, a box of a grid."""

    path: str
    piece: int
    grid: Grid
    number: int


_Pair = tuple[_Box, Piece]
_NAMED = 5  # leaves in an error's text
# What the host makes of denormals, of each term of each update, where the device keeps them.
_FLUSHED = 64 * float(np.finfo(np.float32).tiny)
_FLUSHED_WIDE = 64 * float(np.finfo(np.float64).tiny)
# Of terms in fp32 that were lost a leaf in fp64 shows no more, unless it is as small as these.
_LOST_TERMS = float(np.finfo(np.float32).eps)
_ROTAS = 64  # of so many sets of leaves it is known whose turn it is


_Rota = tuple[Sequence[str], Iterator[list[Turn]]]
"""Of leaves that are saved together: their paths, by number, and what each next sample takes."""


class Auditor:
    """Samples early leaves and remembers which have failed.

    Args:
      options: The user's; `None`: no audit.
      resources: The session's.
    """

    def __init__(self, options: Audit | None, resources: Resources):
        self._options = options
        self._resources = resources
        self._rotas: dict[Any, _Rota] = {}  # by what is saved together; that of the last save last
        # By path, the save whose audit has failed; the replayer writes.
        self._demoted: dict[str, SaveRecord] = {}

    @property
    def has_demoted(self) -> bool:
        """Whether any leaf is late from now on."""
        return bool(self._demoted)

    def demoted(self, paths: Sequence[str]) -> str | None:
        """Why leaves that are updated together are late from now on; `None` if they are not."""
        path = next((p for p in paths if p in self._demoted), None)
        return None if path is None else self._why_late(path)

    @property
    def demotions(self) -> list[str]:
        """Why which leaves are late from now on."""
        return [self._why_late(path) for path in list(self._demoted)]

    def _why_late(self, path: str) -> str:
        step = self._demoted[path].step  # now: the replayer may be before its save has returned
        which = "an earlier save" if step < 0 else f"the save of step {step}"
        return f"{path}: late since the audit of {which} failed"

    def sample(
        self, leaves: Mapping[str, jax.Array], record: SaveRecord, *, is_exact: bool = True
    ) -> "PendingAudit | None":
        """Takes boxes of leaves that left early; returns at once.

        Waits only while the device budget is used up.

        Args:
          leaves: At the sealed version, alive, by path.
          record: The save's.
          is_exact: Whether their replay is; up to rounding, it would only fail again.

        Returns:
          What will compare them; `None` without audit, or if there is nothing to compare.
        """
        options = self._options
        sampled = {path: a for path, a in leaves.items() if can_be_sampled(a)}
        if options is None or not sampled:
            return None
        demotes = options.on_failure == "demote" or not is_exact
        demote = functools.partial(self._demote, record) if demotes else None
        pending = PendingAudit(options, demote, self._resources.host, record)
        pairs = self._next_boxes(sampled, options.fraction)
        try:
            with events.span(events.SPAN_AUDIT):
                self._send_all(pairs, pending)
        except BaseException:
            self._resources.worker.submit(*in_any_case(pending.drop))
            raise
        return pending

    def _next_boxes(self, leaves: Mapping[str, jax.Array], fraction: float) -> list[_Pair]:
        """What has its turn, of those that are saved together."""
        together = frozenset((path, a.shape, a.dtype, a.sharding) for path, a in leaves.items())
        rota = self._rotas.pop(together, None) or self._rota(leaves, fraction)
        self._rotas[together] = rota  # the last
        if len(self._rotas) > _ROTAS:
            del self._rotas[next(iter(self._rotas))]
        paths, samples = rota
        pairs = []
        for turn in next(samples):
            path = paths[turn.leaf]
            piece = self._resources.replicas.pieces(leaves[path])[turn.piece]
            grid = grid_at(piece, turn)
            # Each time the box is the next one.
            pairs.append((_Box(path, turn.piece, grid, turn.time % grid.count), piece))
        return pairs

    def _rota(self, leaves: Mapping[str, jax.Array], fraction: float) -> _Rota:
        kinds = {p: [*map(kind_of, self._resources.replicas.pieces(a))] for p, a in leaves.items()}
        paths = [path for path, of_leaf in kinds.items() if of_leaf]
        turns = Turns([kinds[path] for path in paths], fraction)
        return paths, map(turns.of, itertools.count())

    def _send_all(self, pairs: Sequence[_Pair], pending: "PendingAudit") -> None:
        """In smaller parts, if the device has less room than its budget says."""
        live = [(piece, box.grid, box.number) for box, piece in pairs]
        boxes = [box for box, _ in pairs]  # the worker must not keep the state alive
        sent = 0
        for batch in in_batches(live, self._resources.device.limit_bytes):
            start = functools.partial(start_sample, batch)
            land = functools.partial(pending.land, boxes[sent : sent + len(batch)])
            if not send(start, land, pending.failed, sample_bytes(batch), self._resources):
                self._send_all(pairs[sent:], pending)
                return
            sent += len(batch)

    def _demote(self, record: SaveRecord, path: str) -> bool:
        """Makes a leaf late from now on, for that save's audit; False if it must not be."""
        # The others would have to know: every process stages the same blocks.
        if jax.process_count() == 1:
            self._demoted[path] = record
        return path in self._demoted


class PendingAudit:
    """A sample on its way, and the figures that come of it. All but its making is the replayer's.

    Attributes:
      metadata: The figures as JSON; empty until `check` has returned.
    """

    def __init__(
        self, options: Audit, demote: Callable[[str], bool] | None, host: ByteBudget,
        record: SaveRecord,
    ):  # fmt: skip
        self.metadata: dict[str, Any] = {}
        self._options = options
        self._demote = demote
        self._host = host
        self._record = record
        self._landed: list[tuple[_Box, np.ndarray]] = []
        self._held = Loan()  # of the host's bytes
        self._error: BaseException | None = None

    def land(self, boxes: Sequence[_Box], true: Sequence[np.ndarray]) -> None:
        """Takes in boxes."""
        self._host.add(sum(x.nbytes for x in true), self._held)
        self._landed += zip(boxes, true, strict=True)

    def failed(self, error: BaseException) -> None:
        """Some have not come: `check` raises why."""
        self._error = error

    def check(self, final: Mapping[str, Sequence[HostChunk]]) -> None:
        """Compares replayed leaves with the sample.

        Args:
          final: The chunks of each leaf, by path, in the order of its pieces.

        Raises:
          AuditError: if a chunk is further from the device's own than the bound.
        """
        if self._error is not None:
            raise self._error
        figures, failures = AuditFigures(), []
        for box, true in self._landed:
            found, failure = self._compare(box, final[box.path][box.piece], true)
            figures = figures.plus(found)
            if failure:
                failures.append((found.max_ulps, box.path, failure))
        self._record.audit = figures.plus(self._record.audit)
        self.metadata.update(dataclasses.asdict(figures))
        if failures:
            raise self._failed(failures)

    def drop(self) -> None:
        """Forgets what has landed."""
        self._landed.clear()
        self._host.repay(self._held)

    def _compare(
        self, box: _Box, chunk: HostChunk, true: np.ndarray
    ) -> tuple[AuditFigures, str | None]:
        flat = chunk.data.reshape(-1)
        found = difference(flat[box.grid.run(box.number)], true)
        if not found.elements:
            return AuditFigures(chunks=1, compared_bytes=true.nbytes), None
        scale = scale_of(flat)
        relative = found.max_absolute / (scale or 1.0)
        figures = AuditFigures(
            chunks=1, compared_bytes=true.nbytes, max_ulps=found.max_ulps,
            max_relative_error=relative, worst_leaf=box.path,
        )  # fmt: skip
        is_rounding = found.max_ulps != UNEQUAL and scale > 0  # of zeros nothing was replayed
        is_near = relative <= self._options.max_relative_error or _is_flushed(figures, found, true)
        if found.max_ulps <= self._options.max_ulps or (is_rounding and is_near):
            return figures, None
        is_number = found.max_ulps != UNEQUAL
        ulps = counted(found.max_ulps, "ULP") if is_number else "unlike values"
        return figures, (
            f"`{box.path}`, chunk {box.number} of {box.grid.count} in the shard at {_text(chunk)}: "
            f"{found.elements} of {true.size} elements differ, by up to {ulps} "
            f"({relative:.1e} of the leaf's scale)"
        )

    def _failed(self, failures: Sequence[tuple[int, str, str]]) -> AuditError:
        _, _, worst = max(failures)
        paths = sorted({path for _, path, _ in failures})
        others = ""
        if len(failures) > 1:
            named = ", ".join(paths[:_NAMED]) + (", ..." if len(paths) > _NAMED else "")
            others = f" (and {counted(len(failures) - 1, 'more chunk')}, of {named})"
        follows = 'Pass `on_failure="demote"` to have such leaves leave late.'
        if self._demote is not None:
            follows = "Programs of several processes do not demote: the next window tries again."
            if all([self._demote(path) for path in paths]):
                follows = "They leave late from now on, so later saves will be right."
        options = self._options
        return AuditError(
            f"replay differs from the device: {worst}{others}; `max_ulps={options.max_ulps}` and "
            f"`max_relative_error={options.max_relative_error:g}` are the bounds. Nothing of this "
            "save is visible, earlier checkpoints are intact, and training can go on. "
            f"{follows} If all of it is rounding, pass "
            "`audit=gockpt.Audit(max_relative_error=...)`."
        )


def _is_flushed(figures: AuditFigures, found: Difference, true: np.ndarray) -> bool:
    """Whether denormals that the host takes for zero make such a difference, where others do not.

    Numbers as small as those of fp32 are numbers like others in fp64.
    """
    is_wide = true.dtype in (np.float64, np.complex128)
    if is_wide and figures.max_relative_error > _LOST_TERMS:
        return found.max_absolute <= _FLUSHED_WIDE
    return found.max_absolute <= _FLUSHED


def _text(chunk: HostChunk) -> str:
    spans = (
        f"{s.start or 0}:{(s.start or 0) + n}"
        for s, n in zip(chunk.index, chunk.data.shape, strict=True)
    )
    return f"[{', '.join(spans)}]"
