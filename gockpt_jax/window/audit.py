"""The audit of a window: samples at the sealed version, against what replay made of them."""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from gockpt_jax.errors import AuditError
from gockpt_jax.options import Audit
from gockpt_jax.replay.ulps import UNEQUAL, difference, scale_of
from gockpt_jax.telemetry import events
from gockpt_jax.telemetry.report import AuditFigures
from gockpt_jax.telemetry.save_record import SaveRecord
from gockpt_jax.transfer.budget import ByteBudget, batches
from gockpt_jax.transfer.pull import HostChunk, Pull
from gockpt_jax.transfer.replicas import Piece
from gockpt_jax.transfer.sample import (
    Grid,
    Probe,
    can_be_sampled,
    grid_of,
    sample_bytes,
    share_out,
    start_sample,
)
from gockpt_jax.window.resources import Resources


@dataclasses.dataclass(frozen=True, slots=True)
class _Box:
    """What is compared: of a leaf, of the n-th piece that this process writes, a box of a grid."""

    path: str
    number: int
    grid: Grid
    box: int


_Pair = tuple[_Box, Piece]
_NAMED = 5  # leaves in an error's text


def _probes(pairs: Sequence[_Pair]) -> list[Probe]:
    return [(piece, box.grid, box.box) for box, piece in pairs]


class Auditor:
    """Samples early leaves and remembers which have failed.

    Args:
      options: The user's; `None`: no audit.
      resources: The session's.
    """

    def __init__(self, options: Audit | None, resources: Resources):
        self._options = options
        self._worker = resources.worker
        self._device = resources.device
        self._host = resources.host
        self._replicas = resources.replicas
        self._turns: collections.Counter[Any] = collections.Counter()  # by what is saved together
        self._demoted: dict[str, str] = {}  # reasons, by path; the replayer writes

    @property
    def has_demoted(self) -> bool:
        """Whether any leaf is late from now on."""
        return bool(self._demoted)

    def demoted(self, paths: Sequence[str]) -> str | None:
        """Why leaves that are updated together are late from now on; `None` if they are not."""
        return next((self._demoted[p] for p in paths if p in self._demoted), None)

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
        demote = self._demote if demotes else None
        pending = PendingAudit(options, demote, self._host, record)
        pairs = self._next_boxes(sampled, options.fraction)
        try:
            with events.span(events.SPAN_AUDIT):
                for batch in self._batches(pairs):
                    self._send(batch, pending)
        except BaseException:
            self._worker.submit(pending.drop)
            raise
        return pending

    def _next_boxes(self, leaves: Mapping[str, jax.Array], fraction: float) -> list[_Pair]:
        """What has its turn: first one piece of each leaf, on different devices, then another.

        And of leaves that are alike the others last: so the first save runs a program for each kind
        of them, if it has boxes enough and there is one device. A GPU waits until it is idle where
        it loads a program: later saves should load none.
        """
        order: list[tuple[int, int, int, str, int]] = []
        alike: collections.Counter[Any] = collections.Counter()
        for i, (path, array) in enumerate(leaves.items()):
            owned = len(self._replicas.boxes(array))
            kind = (array.shape, array.dtype)
            order += [((n - i) % owned, alike[kind], i, path, n) for n in range(owned)]
            alike[kind] += 1
        order.sort()
        number, part = share_out(len(order), fraction)
        first = self._turns[frozenset(leaves)]
        self._turns[frozenset(leaves)] += number
        pairs = []
        for at in range(first, first + number):
            *_, path, n = order[at % len(order)]
            piece = self._replicas.pieces(leaves[path])[n]
            grid = grid_of(piece.shape, piece.shard.dtype.itemsize, part)
            # Each time round, the box is the next one.
            pairs.append((_Box(path, n, grid, at // len(order) % grid.count), piece))
        return pairs

    def _batches(self, pairs: Sequence[_Pair]) -> list[list[_Pair]]:
        """All at once, unless the device budget is smaller than that."""
        limit = self._device.limit_bytes
        if limit is not None and sample_bytes(_probes(pairs)) <= limit:
            limit = None
        return list(batches(pairs, lambda pair: sample_bytes(_probes([pair])), limit))

    def _send(self, pairs: Sequence[_Pair], pending: "PendingAudit") -> None:
        probes = _probes(pairs)
        boxes = [box for box, _ in pairs]  # the worker must not keep the state alive
        with self._device.lent(sample_bytes(probes)) as give_back:
            sample = start_sample(probes)

            def land() -> None:
                pending.land(boxes, sample)
                give_back()

            self._worker.submit(land)

    def _demote(self, path: str) -> bool:
        """Makes a leaf late from now on; False if it must not be."""
        # The others would have to know: every process stages the same blocks.
        if jax.process_count() == 1:
            self._demoted[path] = f"{path}: late since the audit of an earlier save failed"
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
        self._error: BaseException | None = None

    def land(self, boxes: Sequence[_Box], sample: Pull[list[np.ndarray]]) -> None:
        """Takes in boxes; what goes wrong is raised by `check`."""
        try:
            true = sample.result()
        except BaseException as error:
            self._error = error
            return
        self._host.add(sum(x.nbytes for x in true))
        self._landed += zip(boxes, true, strict=True)

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
            found, failure = self._compare(box, final[box.path][box.number], true)
            figures = figures.plus(found)
            if failure:
                failures.append((found.max_ulps, box.path, failure))
        self._record.audit = figures.plus(self._record.audit)
        self.metadata.update(dataclasses.asdict(figures))
        if failures:
            raise self._failed(failures)

    def drop(self) -> None:
        """Forgets what has landed."""
        self._host.release(sum(true.nbytes for _, true in self._landed))
        self._landed.clear()

    def _compare(
        self, box: _Box, chunk: HostChunk, true: np.ndarray
    ) -> tuple[AuditFigures, str | None]:
        flat = chunk.data.reshape(-1)
        found = difference(flat[box.grid.run(box.box)], true)
        if not found.elements:
            return AuditFigures(chunks=1, compared_bytes=true.nbytes), None
        relative = found.max_absolute / (scale_of(flat) or 1.0)
        figures = AuditFigures(
            chunks=1, compared_bytes=true.nbytes, max_ulps=found.max_ulps,
            max_relative_error=relative, worst_leaf=box.path,
        )  # fmt: skip
        if found.max_ulps <= self._options.max_ulps:
            return figures, None
        ulps = "unlike values" if found.max_ulps == UNEQUAL else f"{found.max_ulps} ULPs"
        return figures, (
            f"`{box.path}`, chunk {box.box} of {box.grid.count} in the shard at {_text(chunk)}: "
            f"{found.elements} of {true.size} elements differ, by up to {ulps} "
            f"({relative:.1e} of the leaf's scale)"
        )

    def _failed(self, failures: Sequence[tuple[int, str, str]]) -> AuditError:
        _, _, worst = max(failures)
        paths = sorted({path for _, path, _ in failures})
        others = ""
        if len(failures) > 1:
            named = ", ".join(paths[:_NAMED]) + (", ..." if len(paths) > _NAMED else "")
            others = f" (and {len(failures) - 1} more chunks, of {named})"
        follows = 'Pass `on_failure="demote"` to have such leaves leave late.'
        if self._demote is not None:
            follows = "Programs of several processes do not demote: the next window tries again."
            if all([self._demote(path) for path in paths]):
                follows = "They leave late from now on, so later saves will be right."
        return AuditError(
            f"replay differs from the device: {worst}{others}; `max_ulps={self._options.max_ulps}` "
            "is the bound. Nothing of this save is visible, earlier checkpoints are intact, and "
            f"training can go on. {follows} If all of it is rounding, pass "
            "`audit=gockpt.Audit(max_ulps=...)`."
        )


def _text(chunk: HostChunk) -> str:
    spans = (
        f"{s.start or 0}:{(s.start or 0) + n}"
        for s, n in zip(chunk.index, chunk.data.shape, strict=True)
    )
    return f"[{', '.join(spans)}]"
