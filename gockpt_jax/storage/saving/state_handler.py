"""How a state is saved: the window is sealed inside Orbax's own save, and stock does the rest.

Whoever calls knows labels, refused saves and commits: our manager, or for stock's `handler.py`.
"""

import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp

from gockpt_jax.options import WindowOptions
from gockpt_jax.storage.files import bucket, checksum_files
from gockpt_jax.storage.files.item_files import TEMPORARY
from gockpt_jax.storage.files.literal import literal, refuse_backslash
from gockpt_jax.storage.inspecting.stored_item import ARRAY_TYPES
from gockpt_jax.storage.restoring.arguments import GoCkptRestore
from gockpt_jax.storage.restoring.placed import metadata_of
from gockpt_jax.storage.restoring.restore import is_sent, restore
from gockpt_jax.storage.restoring.together import Together, require_whole, require_whole_share
from gockpt_jax.storage.saving.begun import BegunSave
from gockpt_jax.storage.saving.begun_item import BegunItem
from gockpt_jax.storage.saving.commit import CommitVotes
from gockpt_jax.storage.saving.hand_over import HandedOver, run_to_its_end, settled
from gockpt_jax.storage.saving.taken import (
    TakenSave,
    as_tree_save,
    host_array,
    leaves_to_save,
    put_together,
)
from gockpt_jax.storage.saving.written import Voting, Written
from gockpt_jax.storage.writing.array_layout import ReplicaLayout
from gockpt_jax.storage.writing.host_array import HostArray
from gockpt_jax.storage.writing.registry import look_up
from gockpt_jax.storage.writing.tree_handler import TreeHandlers
from gockpt_jax.storage.writing.write_budget import collecting
from gockpt_jax.telemetry.save_record import PendingReport, SaveRecord
from gockpt_jax.transfer.replicas import Replicas
from gockpt_jax.window.face import WindowFace
from gockpt_jax.window.failures import named
from gockpt_jax.window.processes import Processes
from gockpt_jax.window.slots import give_back

# Options of the tree handler that matter when it reads.
_READING = ("type_handler_registry", "restore_concurrent_gb", "multiprocessing_options",
            "pytree_metadata_options")  # fmt: skip


class StateHandler(WindowFace, ocp.AsyncCheckpointHandler):  # type: ignore[misc]  # untyped
    """Saves trees of arrays through a window, and restores them.

    Args:
      window: How the state leaves the device.
      processes: Those that save together; `None`: those of `multiprocessing_options`.
      **options: Keywords of `ocp.PyTreeCheckpointHandler` (`use_ocdbt`, `use_zarr3`, ...).

    Attributes:
      primary_host: The process that merges what all have written; `None`: each has storage of its
        own.
      begun: What has begun of the save that came last, and its label.
      votes: At the commit, if a manager of ours takes them.
      wait_for_metadata: Returns when the manager has noted that of the step, if it does.
      together: How a restore waits for the slowest process: a manager's, for whose barriers Orbax
        was told which take part. Those have a limit; stock's own have none, and need no more.

    Raises:
      TypeError: if `window` is not a `WindowOptions`.
    """

    def __init__(
        self,
        *,
        window: WindowOptions | None = None,
        processes: Processes | None = None,
        **options: Any,
    ):
        together = options.setdefault(
            "multiprocessing_options", ocp.options.MultiprocessingOptions()
        )
        self.primary_host = together.primary_host
        # What a process takes is what Orbax has it write.
        replicas = Replicas(ReplicaLayout.pop_from(dict(options)).write_shape)
        processes = processes or Processes(together.active_processes)
        self._gockpt_start_session(window, processes, replicas)
        session = self._gockpt_session
        limit, host = session.options.write_limit_bytes, session.host
        self._trees = TreeHandlers(write_limit_bytes=limit, host=host, **options)
        self._look_up = look_up(options.get("type_handler_registry"))
        given = ((key, options.get(key)) for key in _READING)
        self._restore_options = {key: value for key, value in given if value is not None}
        # What `_CHECKPOINT_METADATA` names: stock restores without arguments by it.
        self.typestr = ocp.StandardCheckpointHandler.typestr
        self.begun = BegunSave()
        self.votes: CommitVotes | None = None
        self.wait_for_metadata: Callable[[], None] | None = None
        self.together: Together | None = None
        self._taking: PendingReport | None = None  # of the save that was taken last

    @property
    def writers(self) -> str:
        """Names the processes that write one directory together."""
        name = self._gockpt_session.processes.prefix
        return name if self.primary_host is not None else f"{name}_{jax.process_index()}"

    async def async_save(self, directory: Any, args: Any) -> Sequence[ocp.future.Future]:
        """Seals the window (or takes a snapshot) and starts writing what becomes final.

        Beside other processes it raises nothing: they would wait for this one. The save fails at
        its commit instead, on all of them.

        Args:
          directory: Of the item, within the save's temporary directory.
          args: `GoCkptSave`, or stock's `StandardSave` or `PyTreeSave`.
        """
        entered_at = time.perf_counter()
        bucket.prepare(directory)
        refuse_backslash("the item's directory", directory)
        self._enter(directory)
        try:
            taken = args if isinstance(args, TakenSave) else self.take(args, entered_at)
            try:
                self._gockpt_log.pending = taken.pending
                begun = self.begun.add(directory, taken)
            except BaseException:  # an interrupt
                taken.release()
                raise
            written = await self._write(directory, taken, begun)
        except Exception as error:
            if not self._gockpt_session.processes.several:
                raise
            written = concurrent.futures.Future()
            written.set_exception(error)
        processes = self._gockpt_session.processes
        if self.votes is None and processes.several:
            is_told = ocp.multihost.is_primary_host(self.primary_host)
            pending = None if is_told else self._gockpt_log.pending
            written = Voting(written, processes, pending, self.begun.label)
        return [written]

    def leaves_to_save(self, args: Any) -> tuple[list[Any], Any]:
        """The leaves of a tree as they shall be saved, and its structure; raises if they cannot."""
        return leaves_to_save(args, self._look_up)

    def take(self, args: Any, entered_at: float | None = None) -> TakenSave:
        """Seals the window (or takes a snapshot): no step can change any more what is written.

        Beside other processes it raises nothing: what went wrong is raised when it is written.

        Args:
          args: As in `async_save`.
          entered_at: When the save has come so far; `None`: now.

        Raises:
          DeviceMemoryError: if a device has no memory for the copies of the state.
        """
        entered_at = time.perf_counter() if entered_at is None else entered_at
        try:
            return self._take(args, entered_at)
        except BaseException as failure:
            error = named(self.begun.label, failure)
            refused = SaveRecord(kind="snapshot", reason="the state could not be taken")
            pending = PendingReport(refused, self.begun.label, entered_at, self._gockpt_log)
            pending.failed(error)
            if self._gockpt_session.processes.several and isinstance(error, Exception):
                return TakenSave(ocp.args.PyTreeSave({}), pending, error)
            if error is failure:
                raise
            raise error from failure

    def _take(self, args: Any, entered_at: float) -> TakenSave:
        if self._gockpt_session.processes.several:  # alone, its window waits for a mended save
            self._gockpt_session.begin_save()
        self.begun.require_clean()
        leaves, tree = self.leaves_to_save(args)
        positions = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)]
        arrays, host = [leaves[i] for i in positions], self._gockpt_session.host
        record, slots, audit = self._gockpt_session.take(arrays)
        try:
            owners = {id(promised): i for i, promised in enumerate(slots)}  # arrays are there twice
            if self._taking is None or self._taking.record is not record:
                self._taking = PendingReport(record, self.begun.label, entered_at, self._gockpt_log)
            for i, promised in enumerate(slots):
                account = host if owners[id(promised)] == i else None
                leaves[positions[i]] = host_array(leaves[positions[i]], promised, account)
            return TakenSave(as_tree_save(args, put_together(tree, leaves), audit), self._taking)
        except BaseException:  # an interrupt, or metadata that cannot be copied
            give_back([slot for promised in slots for slot in promised], host)
            raise

    async def _write(self, directory: Any, taken: TakenSave, begun: BegunItem) -> ocp.future.Future:
        """Has what becomes final written: begun on another thread, if `save` may return before."""
        if taken.error is not None:
            raise taken.error
        save = settled(taken.save)
        if save is None:
            return await self._begin_writing(directory, taken, begun)
        settled_save = dataclasses.replace(taken, save=save)
        begin = functools.partial(self._begin_writing, directory, settled_save, begun)
        begun.handed_over = HandedOver(begin, self.begun.may_be_written)
        return begun.handed_over

    async def _begin_writing(
        self, directory: Any, taken: TakenSave, begun: BegunItem
    ) -> ocp.future.Future:
        """Has stock begin to write."""
        stats = begun.stats
        try:
            tree = self._trees.of(taken.save.item)
            if ocp.multihost.is_primary_host(self.primary_host):
                save = taken.save
                stats.checksums.add_values(save.item, save.save_args, self._is_stocks_array)
            with collecting(stats):
                futures = await tree.async_save(directory, args=taken.save)
        except BaseException as error:
            stats.is_given_up = True  # what has begun of it
            taken.release()
            error.add_note(f"gockpt_jax: while {directory} was handed to Orbax.")
            raise
        begun.written = Written(futures or (), taken.pending.record, stats, directory)
        return begun.written

    def _is_stocks_array(self, leaf: Any) -> bool:
        """Whether a leaf that is none of ours will be an array on disk."""
        is_ours = isinstance(leaf, HostArray)
        return not is_ours and self._look_up(type(leaf)).typestr() in ARRAY_TYPES

    def _enter(self, directory: Any) -> None:
        """Items of one save lie in one directory, each once; whatever else comes is another save.

        So is one in the place of a save that has failed, or been deleted.
        """
        item = str(directory)
        folder, _, name = item.rpartition("/")
        # Without a manager the item is the save.
        save = item if TEMPORARY in name and TEMPORARY not in folder else folder
        if self.begun.enter(save, item):
            self._gockpt_session.end_save()
            self._begin(save)

    def _begin(self, directory: str) -> None:
        """Another save begins, into this directory."""
        if self.votes is not None:
            self.votes.begin(self.begun.label)

    def save(self, directory: Any, args: Any) -> None:
        """Saves and waits; used where asynchronous checkpointing is switched off."""

        async def save_and_wait() -> None:
            for future in await self.async_save(directory, args):
                future.result()

        run_to_its_end(save_and_wait())

    def restore(self, directory: Any, args: Any = None) -> Any:
        """Restores as stock does; without a target, as it was saved.

        Raises:
          ProcessError: if another process has failed to restore its part.
          TargetError: if checkpoint and target do not fit together; names all leaves.
          VerifyError: if `verify=True` and the checkpoint is not what was written.
        """
        bucket.prepare(directory)
        args, directory = GoCkptRestore() if args is None else args, literal(directory)
        read = functools.partial(restore, directory, args, self._restore_options)
        is_checked = isinstance(args, GoCkptRestore) and args.verify
        processes, together = self._gockpt_session.processes, self.together
        if together is None:
            if is_checked:
                require_whole(directory, processes)
            return read()
        check = functools.partial(require_whole_share, directory, processes)
        if is_checked or is_sent(args):
            together.check(check if is_checked else lambda: None, directory)
        return together.read(read, directory)

    def metadata(self, directory: Any) -> Any:
        """Shapes, dtypes and shardings of a checkpoint, as stock gives them."""
        return metadata_of(directory, self._restore_options)

    def finalize(self, directory: Any) -> None:
        """Merges what the processes wrote, and completes the checksums: only the rename is left."""
        self._trees.finalize(directory)
        if self.wait_for_metadata is not None:
            self.wait_for_metadata()  # the checksums tell of it, too
        members = self._gockpt_session.processes.members
        checksum_files.write_item_file(directory, None if self.primary_host is None else members)

    def committed(self) -> None:
        """The last save is visible, if there is one and it has not failed."""
        if (pending := self._gockpt_log.pending) is not None:
            pending.committed()

    def close(self) -> None:
        """Closes the stock handlers inside."""
        self._trees.close()


# Orbax asks for a handler's own arguments, by its class.
ocp.args.register_with_handler(StateHandler, for_save=True)(TakenSave)


@ocp.args.register_with_handler(StateHandler, for_restore=True)
@dataclasses.dataclass
class RestoreAsSaved(GoCkptRestore):
    """What Orbax gives where the user gives no arguments."""
