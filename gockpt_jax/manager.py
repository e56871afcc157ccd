"""`GoCkptManager`: an `ocp.CheckpointManager` whose saves leave the device over several steps."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import orbax.checkpoint as ocp
from etils import epath

from gockpt_jax.options import WindowOptions
from gockpt_jax.storage.handler import GoCkptHandler, GoCkptRestore, GoCkptSave
from gockpt_jax.storage.policies import labels_to_save
from gockpt_jax.telemetry.report import ReportLog, SaveReport
from gockpt_jax.training.call import Places
from gockpt_jax.training.wrap import WrappedStep
from gockpt_jax.window.session import Session

_ITEM = "state"
_METRICS = "metrics"


class GoCkptManager(ocp.CheckpointManager):  # type: ignore[misc]  # Orbax is untyped.
    """A checkpoint manager that takes the state over the K steps that end at the save step.

    A stock manager in every other respect: retention, metrics, `Composite` arguments, stock save
    and restore arguments, preemption. What it writes is an ordinary Orbax checkpoint, whose item is
    named `state` unless the user names it.

    Args:
      directory: Where the checkpoints are.
      options: As in `ocp.CheckpointManager`.
      window: How the state leaves the device.
      metadata: As in `ocp.CheckpointManager`.
      logger: As in `ocp.CheckpointManager`.
      handler_registry: Handlers of further items, as in `ocp.CheckpointManager`.
      pytree_options: Keywords of `ocp.PyTreeCheckpointHandler` for the state (`use_ocdbt`, ...).

    Raises:
      TypeError: if `window` is not a `WindowOptions`.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp
      >>> @jax.jit
      ... def train_step(state):
      ...     return {"w": state["w"] * 0.5}
      >>> with GoCkptManager(tempfile.mkdtemp()) as manager:
      ...     step = manager.wrap(train_step)
      ...     state = step({"w": jnp.ones(2)})
      ...     saved = manager.save(0, args=GoCkptSave(state))
      ...     restored = manager.restore(0)
      >>> saved, restored["w"].tolist()
      (True, [0.5, 0.5])
    """

    def __init__(
        self,
        directory: Any,
        *,
        options: ocp.CheckpointManagerOptions | None = None,
        window: WindowOptions | None = None,
        metadata: Mapping[str, Any] | None = None,
        logger: Any = None,
        handler_registry: Any = None,
        pytree_options: Mapping[str, Any] | None = None,
    ):
        window = WindowOptions() if window is None else window
        if not isinstance(window, WindowOptions):
            raise TypeError(
                f"`window` must be a `WindowOptions`, got {window!r}. For a fixed K pass "
                "`window=gockpt.WindowOptions(steps=K)`."
            )
        options = ocp.CheckpointManagerOptions() if options is None else options
        self._gockpt_window_options = window
        self._gockpt_options = options
        self._gockpt_log = ReportLog()
        self._gockpt_session = Session(window, labels_to_save(options))
        self._gockpt_handler = GoCkptHandler(
            self._gockpt_session,
            self._gockpt_log,
            write_limit_bytes=window.write_limit_bytes,
            **(pytree_options or {}),
        )
        self._gockpt_commits_later = (
            bool(options.enable_async_checkpointing) and not options.read_only
        )
        super().__init__(
            _absolute(directory),
            options=self._told_of_commits(options),
            metadata=metadata,
            logger=logger,
            handler_registry=_registry(handler_registry, self._gockpt_handler),
        )

    # Training.

    def wrap(
        self, step: Callable[..., Any], *, state: Places = 0, state_out: Places | None = None
    ) -> WrappedStep:
        """Wraps a jitted train step, so that its updates are counted and its state can leave early.

        State, optimizer, shardings, donation and the `jax.jit` call stay as they are, and outside
        windows the very same executable runs. Several steps may be wrapped; they share one count.

        Args:
          step: What `jax.jit` returned.
          state: Position or name of the state among the arguments, or several of them.
          state_out: Position or name of the new state in the result; found by structure if `None`.

        Returns:
          A function to call in its place.

        Raises:
          WrapError: if `step` is not callable, is wrapped already, or a place is not one.

        Warns:
          SnapshotOnlyWarning: if the step cannot be armed; all its saves are then snapshots.
        """
        return WrappedStep(
            step,
            self._gockpt_session,
            state=state,
            state_out=state_out,
            arm=self._gockpt_window_options.arm,
            even_for_nothing=self._gockpt_window_options.steps is not None,
        )

    def expect_save(self, *, in_steps: int) -> None:
        """Says that the save after the next `in_steps` updates will be accepted.

        For saves that nothing can foresee: irregular ones, or the first.

        Args:
          in_steps: Updates until the save, at least 1.

        Raises:
          ValueError: if it is less than 1.
        """
        if isinstance(in_steps, bool) or not isinstance(in_steps, int) or in_steps < 1:
            raise ValueError(
                f"`in_steps` must be an integer of at least 1, got {in_steps!r}. Give the number "
                "of calls of the wrapped step until the save."
            )
        self._gockpt_session.predictor.expect(self._gockpt_session.version + in_steps)

    def explain(self, file: TextIO | None = None) -> None:
        """Prints what of the last wrapped step leaves early, what is retained, what is late.

        Args:
          file: Where to; standard output if `None`.
        """
        print(self._gockpt_session.explain(), file=file)

    # Saving and restoring.

    def save(self, step: int, *args: Any, **kwargs: Any) -> bool:
        """Saves if the policy says so; arguments and result are those of `ocp.CheckpointManager`.

        A bare `args=GoCkptSave(state)` is saved as item `state`.

        Raises:
          HostBudgetError: if the host budget cannot hold the state.
        """
        started_at = time.perf_counter()
        if "args" in kwargs:
            kwargs["args"] = _as_composite(kwargs["args"])
        self._gockpt_handler.label = step
        before = self._gockpt_handler.pending
        try:
            accepted = bool(super().save(step, *args, **kwargs))
        except BaseException as error:
            pending = self._gockpt_handler.pending
            if pending is not None and pending is not before:
                pending.failed(error)
            raise
        self._gockpt_session.predictor.observe(self._gockpt_session.version, step, accepted)
        pending = self._gockpt_handler.pending
        if pending is not None and pending is not before:
            pending.returned(started_at)
            if not self._gockpt_commits_later:
                pending.committed()
        return accepted

    def restore(self, step: int | None, *args: Any, **kwargs: Any) -> Any:
        """Restores a step; arguments and result are those of `ocp.CheckpointManager`.

        A bare `args=GoCkptRestore(target)`, or none, gives the item `state` itself. A checkpoint
        that a stock manager wrote without naming its item restores too.
        """
        self._gockpt_session.abandon("a checkpoint was restored")
        wanted = kwargs.get("args")
        if isinstance(wanted, ocp.args.Composite):
            return super().restore(step, *args, **kwargs)
        if step is None and not kwargs.get("directory"):
            step = self.latest_step()
        root = kwargs.get("directory") or self.directory
        if step is not None and (_step_path(root, step, self._gockpt_options) / "default").exists():
            return self._restore_unnamed(root, step, wanted)
        if wanted is not None:
            kwargs["args"] = _as_composite(wanted)
        restored = super().restore(step, *args, **kwargs)
        return _only_item(restored, asked_for=wanted is not None)

    def _restore_unnamed(self, root: Any, step: int, wanted: Any) -> Any:
        """Restores what a stock manager saved without a name, with a stock manager.

        A manager is bound to named or to unnamed items by the first it sees, so this one must not
        see it.
        """
        options = dataclasses.replace(
            self._gockpt_options, read_only=True, async_options=None, create=False
        )
        with ocp.CheckpointManager(root, options=options) as stock:
            args = wanted.as_stock() if isinstance(wanted, GoCkptRestore) else wanted
            return stock.restore(step, args=args)

    def item_metadata(self, step: int) -> Any:
        """Shapes and dtypes of a step, as stock gives them for the same arguments."""
        return _only_item(super().item_metadata(step), asked_for=False)

    def wait_until_finished(self) -> None:
        """Waits until the last save is visible; raises what went wrong with it."""
        try:
            super().wait_until_finished()
        except BaseException as error:
            if self._gockpt_handler.pending is not None:
                self._gockpt_handler.pending.failed(error)
            raise

    def close(self) -> None:
        """Waits for the last save, drops an open window and ends the worker thread."""
        try:
            super().close()
        finally:
            self._gockpt_session.close()

    # Telemetry.

    @property
    def reports(self) -> tuple[SaveReport, ...]:
        """A report for every save that has been committed or has failed, oldest first."""
        return self._gockpt_log.all()

    @property
    def last_report(self) -> SaveReport | None:
        """The newest of `reports`."""
        return next(reversed(self.reports), None)

    @property
    def window_status(self) -> str:
        """What the window is doing now, in a few words: "idle", "window 2/5"."""
        status = self._gockpt_session.window_status
        pending = self._gockpt_handler.pending
        if status == "idle" and pending is not None and not pending.is_finished:
            return f"draining step {pending.step}"
        return status

    def _told_of_commits(
        self, options: ocp.CheckpointManagerOptions
    ) -> ocp.CheckpointManagerOptions:
        """The user's options, with a word to us after each commit."""
        if not self._gockpt_commits_later:
            return options
        async_options = options.async_options or ocp.options.AsyncOptions()
        users = async_options.post_finalization_callback

        def committed() -> None:
            if self._gockpt_handler.pending is not None:
                self._gockpt_handler.pending.committed()
            if users is not None:
                users()

        told = dataclasses.replace(async_options, post_finalization_callback=committed)
        return dataclasses.replace(options, async_options=told)


def _registry(given: Any, handler: GoCkptHandler) -> Any:
    """The user's handlers, ours for our own arguments, and stock's for stock arguments."""
    registry = ocp.DefaultCheckpointHandlerRegistry(given)
    ours = [(GoCkptSave, handler), (GoCkptRestore, handler)]
    tree, standard = ocp.PyTreeCheckpointHandler(), ocp.StandardCheckpointHandler()
    stock = [
        (ocp.args.PyTreeSave, tree),
        (ocp.args.PyTreeRestore, tree),
        (ocp.args.StandardSave, standard),
        (ocp.args.StandardRestore, standard),
    ]
    # Finalize takes the first entry of an item, restore without arguments the last: ours, then
    # stock's. `None` stands for items of any other name.
    for item, (args, item_handler) in itertools.product((_ITEM, None), (*ours, *stock)):
        if not registry.has(item, args):
            registry.add(item, args, item_handler)
    return registry


def _absolute(directory: Any) -> Any:
    """Local paths made absolute, as Orbax demands; addresses of buckets as they are."""
    path = epath.Path(directory)
    return path if "://" in str(directory) else path.absolute()


def _step_path(root: Any, step: int, options: ocp.CheckpointManagerOptions) -> Any:
    names = options.step_name_format or ocp.path.step.standard_name_format(
        step_prefix=options.step_prefix,
        step_format_fixed_length=options.step_format_fixed_length,
    )
    return ocp.path.step.build_step_path(epath.Path(root), names, step)


def _as_composite(args: Any) -> Any:
    if args is None or isinstance(args, ocp.args.Composite):
        return args
    return ocp.args.Composite(**{_ITEM: args})


def _only_item(composite: Any, *, asked_for: bool) -> Any:
    """What a bare call gets back: the item itself, where it is the only one."""
    if asked_for or set(composite.keys()) - {_METRICS} == {_ITEM}:
        return composite[_ITEM]
    return composite
