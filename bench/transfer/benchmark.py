"""What the transfer costs the trainer's thread, and what it holds, against its budgets.

On the CPU backend nothing crosses a link: shown are the hooks around the step, for a model of 300
leaves, and bytes by the library's own accounting. On an accelerator its questions follow
(`bench/transfer/gpu.py`).
"""

import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

import gockpt_jax as gockpt
from bench.device import without_fma
from bench.record import Record
from bench.transfer.gpu import answer
from bench.transfer.hooks import NOTES, Hooks
from bench.transfer.save_call import measure

_LEAVES = 300  # a third of them parameters, the others their moments, and a counter
_STEPS = 5
_LIMIT_SECS = {True: 30.0, False: 300.0}  # of the questions to an accelerator


def run(quick: bool) -> Record:
    """Runs the benchmark.

    Args:
      quick: Fewer windows.
    """
    without_fma()
    record = Record("transfer")
    # Leaves are small: the CPU backend copies them on the caller's thread, as no accelerator does.
    width, saves = 64, 12 if quick else 40
    samples, reports, state_bytes, budget = _train(width, saves)
    record.samples |= samples
    windows = [r for r in reports if r.kind == "window"]
    record.samples["staged_budget_ratio"] = [r.peak_device_bytes / budget for r in windows]
    record.samples["host_state_ratio"] = [r.peak_host_bytes / r.state_bytes for r in windows]
    record.samples["host_budget_ratio"] = [r.peak_host_bytes / r.host_budget_bytes for r in windows]
    record.notes += [
        f"Adam, {_LEAVES} leaves of {width} x {width} fp32 ({state_bytes / 2**20:.0f} MiB), windows"
        f" of {_STEPS} steps, {len(windows)} of them; each step is waited for, and what follows it"
        " on the worker threads, and every second save until it is committed: the hooks are timed"
        " alone, and need not wait for budgets.",
        *NOTES,
        "staged_budget_ratio: most bytes staged and retained on one device at once, padding "
        f"included, over the device budget of {budget / 2**20:.1f} MiB; host_state_ratio: most "
        "bytes of chunks, retained values, replay's and the writer's buffers on the host, over the "
        "state's; host_budget_ratio: over the default host budget.",
    ]
    measure(record, lambda: _model(width, 120 if quick else _LEAVES), saves=7 if quick else 25)
    if jax.default_backend() == "cpu":
        record.notes.append("No accelerator: its questions were not asked.")
    else:
        answer(record, quick=quick, limit_secs=_LIMIT_SECS[quick])
    return record


def _train(width: int, saves: int) -> tuple[dict[str, list[float]], Any, int, int]:
    """Trains through some windows; the hooks' samples, the reports, bytes of state and budget."""
    state, update = _model(width)
    state_bytes = sum(x.nbytes for x in jax.tree.leaves(state))
    # Room for a block of a quarter of the moments, and what two steps in flight retain.
    budget = state_bytes * 7 // 6
    interval = 4 * _STEPS
    options = ocp.CheckpointManagerOptions(save_interval_steps=interval, max_to_keep=1)
    window = gockpt.WindowOptions(steps=_STEPS, device_budget_bytes=budget)
    with (
        tempfile.TemporaryDirectory() as directory,
        gockpt.GoCkptManager(directory, options=options, window=window) as manager,
    ):
        hooks = Hooks(manager)
        step = hooks.wrap(update)
        with hooks.watch():
            for label in range(interval * saves + 1):
                state = jax.block_until_ready(step(state))
                manager._gockpt_session.resources.worker.wait_until_idle()
                if manager.save(label, args=gockpt.GoCkptSave(state)) and label % (2 * interval):
                    manager.wait_until_finished()
        manager.wait_until_finished()
        return hooks.samples, manager.reports, state_bytes, budget


def _model(width: int, leaves: int = _LEAVES) -> tuple[Any, Any]:
    tx = optax.adam(1e-3)
    params = {f"w{n:03}": jnp.full((width, width), 1.0 + n) for n in range(leaves // 3)}

    def loss(params: Any) -> Any:
        return sum(jnp.sum(jnp.cos(w)) for w in params.values())

    def update(state: Any) -> Any:
        params, opt = state
        updates, opt = tx.update(jax.grad(loss)(params), opt, params)
        return optax.apply_updates(params, updates), opt

    return (params, tx.init(params)), jax.jit(update, donate_argnums=0)
