"""What the transfer costs the trainer's thread, and what it holds, against its budgets.

On the CPU backend nothing crosses a link: shown are the hooks around the step, for a model of 300
leaves, and bytes by the library's own accounting. On an accelerator its questions follow
(`bench/transfer/gpu.py`).
"""

import dataclasses
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

from bench.record import Record

_LEAVES = 300  # a third of them parameters, the others their moments, and a counter
_STEPS = 5
_LIMIT_SECS = {True: 30.0, False: 300.0}  # of the questions to an accelerator


@dataclasses.dataclass
class Hooks:
    """Time that the trainer's thread spends in our hooks, by step.

    Attributes:
      idle: Outside windows, in seconds.
      window: In windows, the step that opens one included.
      opening: Of these, the steps that open one.
      window_cpu: Likewise, of the thread's own processor time: on the CPU backend small copies are
        made by the thread that asks for them, and other work on the machine is not in it.
    """

    idle: list[float] = dataclasses.field(default_factory=list)
    window: list[float] = dataclasses.field(default_factory=list)
    opening: list[float] = dataclasses.field(default_factory=list)
    window_cpu: list[float] = dataclasses.field(default_factory=list)

    def watch(self, session: Any) -> None:
        """Times a session's hooks from now on."""
        before, after = session.before_update, session.after_update
        spent = [0.0, 0.0]

        def timed(hook: Callable[..., Any], *args: Any) -> Any:
            wall, cpu = time.perf_counter(), time.thread_time()
            result = hook(*args)
            spent[0] += time.perf_counter() - wall
            spent[1] += time.thread_time() - cpu
            return result

        was_open = False

        def before_update(*args: Any) -> Any:
            nonlocal was_open
            was_open = session.window_status != "idle"
            spent[:] = [0.0, 0.0]
            return timed(before, *args)

        def after_update(step: Any, result: Any, cut: Any) -> Any:
            timed(after, step, result, cut)
            if cut is None:
                self.idle.append(spent[0])
            else:
                self.window.append(spent[0])
                if not was_open:
                    self.opening.append(spent[0])
                self.window_cpu.append(spent[1])

        session.before_update, session.after_update = before_update, after_update


def run(quick: bool) -> Record:
    """Runs the benchmark.

    Args:
      quick: Fewer windows.
    """
    # Without it the CPU backend contracts, and no window that must be exact would open.
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_max_isa=AVX".strip()
    import jax

    from bench.transfer.save_call import measure

    record = Record("transfer")
    # Leaves are small: the CPU backend copies them on the caller's thread, as no accelerator does.
    width, saves = 64, 8 if quick else 20
    hooks, reports, state_bytes, budget = _train(width, saves)
    # In the first two windows something may still be compiled.
    skipped = 2 * (_STEPS - 1)
    record.samples["hook_idle_us"] = [1e6 * secs for secs in hooks.idle]
    record.samples["hook_window_ms"] = [1e3 * secs for secs in hooks.window[skipped:]]
    record.samples["hook_opening_ms"] = [1e3 * secs for secs in hooks.opening[2:]]
    record.samples["hook_window_cpu_ms"] = [1e3 * secs for secs in hooks.window_cpu[skipped:]]
    windows = [r for r in reports if r.kind == "window"]
    record.samples["staged_budget_ratio"] = [r.peak_device_bytes / budget for r in windows]
    record.samples["host_state_ratio"] = [r.peak_host_bytes / r.state_bytes for r in windows]
    record.samples["host_budget_ratio"] = [r.peak_host_bytes / r.host_budget_bytes for r in windows]
    record.notes += [
        f"Adam, {_LEAVES} leaves of {width} x {width} fp32 ({state_bytes / 2**20:.0f} MiB), windows"
        f" of {_STEPS} steps, {len(windows)} of them; each step is waited for, and what follows it"
        " on the worker thread: the hooks are timed alone, and need not wait for budgets.",
        "hook_idle_us, hook_window_ms: per step, outside and in windows, what our hooks before and "
        "after it take on the trainer's thread; hook_opening_ms: in the steps that open a window; "
        "hook_window_cpu_ms: in windows, the processor time of the thread, without other work on "
        "the machine.",
        "staged_budget_ratio: most bytes staged and retained on one device at once, padding "
        f"included, over the device budget of {budget / 2**20:.1f} MiB; host_state_ratio: most "
        "bytes of chunks, retained values, replay's and the writer's buffers on the host, over the "
        "state's; host_budget_ratio: over the default host budget.",
    ]
    measure(record, lambda: _model(width, 120 if quick else _LEAVES), saves=7 if quick else 25)
    if jax.default_backend() == "cpu":
        record.notes.append("No accelerator: its questions were not asked.")
    else:
        from bench.transfer.gpu import answer

        answer(record, quick=quick, limit_secs=_LIMIT_SECS[quick])
    return record


def _train(width: int, saves: int) -> tuple[Hooks, Any, int, int]:
    """Trains through some windows; the hooks' times, the reports, bytes of state and budget."""
    import jax
    import orbax.checkpoint as ocp

    import gockpt_jax as gockpt

    state, update = _model(width)
    state_bytes = sum(x.nbytes for x in jax.tree.leaves(state))
    # Room for a block of a quarter of the moments, and what two steps in flight retain.
    budget = state_bytes * 7 // 6
    options = ocp.CheckpointManagerOptions(save_interval_steps=4 * _STEPS, max_to_keep=1)
    window = gockpt.WindowOptions(steps=_STEPS, device_budget_bytes=budget)
    hooks = Hooks()
    with (
        tempfile.TemporaryDirectory() as directory,
        gockpt.GoCkptManager(directory, options=options, window=window) as manager,
    ):
        step = manager.wrap(update)
        hooks.watch(manager._gockpt_session)
        for label in range(4 * _STEPS * saves + 1):
            state = jax.block_until_ready(step(state))
            manager._gockpt_session.resources.worker.wait_until_idle()
            manager.save(label, args=gockpt.GoCkptSave(state))
        manager.wait_until_finished()
        return hooks, manager.reports, state_bytes, budget


def _model(width: int, leaves: int = _LEAVES) -> tuple[Any, Any]:
    import jax
    import jax.numpy as jnp
    import optax

    tx = optax.adam(1e-3)
    params = {f"w{n:03}": jnp.full((width, width), 1.0 + n) for n in range(leaves // 3)}

    def loss(params: Any) -> Any:
        return sum(jnp.sum(jnp.cos(w)) for w in params.values())

    def update(state: Any) -> Any:
        params, opt = state
        updates, opt = tx.update(jax.grad(loss)(params), opt, params)
        return optax.apply_updates(params, updates), opt

    return (params, tx.init(params)), jax.jit(update, donate_argnums=0)
