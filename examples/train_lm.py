"""Train a small GPT on the Python standard library; kill it whenever you like; start it again.

    python examples/train_lm.py --steps 200 --save-every 50 --directory runs/lm

Checkpoints leave the device a part at a time, during the few steps before each save. What differs
from a loop around `orbax.checkpoint.CheckpointManager` is marked (1) to (3). SIGTERM saves, and
ends the run; a kill costs it what came after its last checkpoint. Started again, on as many devices
as there are, it goes on.
"""

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec
from lm import data, journal, sharding
from lm.arguments import at_least
from lm.console import Display
from lm.model import GPT, SIZES
from lm.optimizer import make_optimizer
from lm.preemption import EXIT_STOPPED, Preemption

import gockpt_jax as gockpt

TrainStep = Callable[[gockpt.GoCkptState, jax.Array], tuple[gockpt.GoCkptState, jax.Array]]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=at_least(1), default=200, help="length of the run")
    add("--size", choices=SIZES, default="nano", help="size of the network")
    add("--batch-size", type=at_least(1), default=8, help="excerpts per step, over all devices")
    add("--seq-len", type=at_least(1), default=128, help="bytes per excerpt")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the computation")
    add("--seed", type=at_least(0), default=0, help="of the initial parameters and of the batches")
    add("--directory", type=Path, default=Path("runs/lm"), help="where the run lives")
    add("--save-every", type=at_least(1), default=50, help="steps between checkpoints")
    add("--max-to-keep", type=at_least(1), default=3, help="older checkpoints are deleted")
    add("--window", type=at_least(0), default=0, help="steps of a save's window; 0 = automatic")
    add("--report", type=Path, help="write losses and save reports to this JSON file")
    add("--crash-at", type=int, help="SIGKILL ourselves after this train step, before its save")
    args = parser.parse_args()
    if args.batch_size % jax.local_device_count():
        parser.error(
            f"--batch-size: expected a multiple of the {jax.local_device_count()} devices, "
            f"got {args.batch_size}"
        )
    return args


def init_state(args: argparse.Namespace, key: jax.Array) -> gockpt.GoCkptState:
    """Return the state of version 0."""
    model = GPT(SIZES[args.size], context=args.seq_len, dtype=jnp.dtype(args.dtype))
    variables = model.init(key, jnp.zeros((args.batch_size, args.seq_len), jnp.uint8))
    state = gockpt.GoCkptState.create(  # (1) was: flax.training.train_state.TrainState.create(
        apply_fn=model.apply, params=variables["params"], tx=make_optimizer(args.steps)
    )
    # `create` counts with a Python int. An array has one type in fresh and in restored states, so
    # both run the same compiled step.
    return state.replace(step=jnp.zeros((), jnp.int32))


def make_train_step(shardings: Any) -> TrainStep:
    """Return the jitted step `(state, batch) -> (state, loss)`; it consumes the state."""

    # Donation lets the new state take the old one's memory. It is also why a checkpoint cannot
    # simply be copied while training goes on: the buffers that it reads are overwritten.
    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(shardings, None))
    def train_step(
        state: gockpt.GoCkptState, batch: jax.Array
    ) -> tuple[gockpt.GoCkptState, jax.Array]:
        batch = batch.astype(jnp.int32)
        inputs, targets = batch[:, :-1], batch[:, 1:]

        def loss_fn(params: Any) -> jax.Array:
            logits = state.apply_fn({"params": params}, inputs)
            return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    return train_step


def make_manager(args: argparse.Namespace) -> gockpt.GoCkptManager:
    """Open the checkpoints of the run."""
    window = gockpt.WindowOptions(max_steps=8)
    if args.window:
        window = gockpt.WindowOptions(steps=args.window)
    return gockpt.GoCkptManager(  # (2) was: ocp.CheckpointManager(
        args.directory.resolve() / "checkpoints",
        options=ocp.CheckpointManagerOptions(
            save_interval_steps=args.save_every, max_to_keep=args.max_to_keep
        ),
        window=window,
    )


def start_or_resume(
    manager: gockpt.GoCkptManager, init: Callable[[], gockpt.GoCkptState], target: Any
) -> tuple[gockpt.GoCkptState, int | None]:
    """Return the state to go on from, and the label that it was restored from, if it was."""
    label = manager.latest_step()
    if label is None:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, target)
        return jax.jit(init, out_shardings=shardings)(), None
    return manager.restore(label, args=gockpt.GoCkptRestore(target)), label


def loop(
    args: argparse.Namespace,
    manager: gockpt.GoCkptManager,
    state: gockpt.GoCkptState,
    steps: range,
    train_step: TrainStep,
    batch_at: Callable[[int], jax.Array],
    losses: journal.Journal,
) -> bool:
    """Train for `steps`, or until SIGTERM; return whether all of them were made."""
    preemption = Preemption()
    for step in steps:
        state, loss = train_step(state, batch_at(step))
        if step == args.crash_at:
            journal.crash(args.directory, step, manager.window_status)
        is_stopped = preemption.is_asked  # Looked at once: it may change below.
        # The manager knows which steps are due; the last one is kept wherever it falls.
        is_last = is_stopped or step == args.steps - 1
        manager.save(step, args=gockpt.GoCkptSave(state), force=is_last)
        losses.record(step, loss)
        if is_stopped:
            return step == args.steps - 1
    return True


def train(
    args: argparse.Namespace,
    corpus: np.ndarray,
    manager: gockpt.GoCkptManager,
    mesh: jax.sharding.Mesh,
) -> bool:
    """Go from wherever the directory stands to the last step; return whether it was reached."""
    init = functools.partial(init_state, args, jax.random.key(args.seed))
    target = sharding.with_fsdp(jax.eval_shape(init), mesh)
    state, resumed_from = start_or_resume(manager, init, target)
    start = 0 if resumed_from is None else resumed_from + 1
    train_step = make_train_step(jax.tree.map(lambda leaf: leaf.sharding, target))
    train_step = manager.wrap(train_step)  # (3) the one new line
    batch_sharding = NamedSharding(mesh, PartitionSpec(sharding.AXIS))

    def batch_at(step: int) -> jax.Array:
        excerpts = data.batch(
            corpus, seed=args.seed, step=step, size=args.batch_size, length=args.seq_len
        )
        return jax.device_put(excerpts, batch_sharding)

    def show(step: int, loss: float) -> None:
        display.update(step, loss, manager.window_status)

    tokens_per_step = args.batch_size * args.seq_len
    with (
        Display(steps=args.steps, start=start, tokens_per_step=tokens_per_step) as display,
        journal.Journal(args.directory, on_loss=show) as losses,
    ):
        display.say(greeting(args, target.params, mesh, corpus, resumed_from))
        steps = range(start, args.steps)
        is_done = loop(args, manager, state, steps, train_step, batch_at, losses)
    manager.wait_until_finished()  # The reports below are complete only now.
    if args.report:
        journal.write_report(
            args.report, resumed_from=resumed_from, losses=losses.losses, saves=manager.reports
        )
    return is_done


def greeting(
    args: argparse.Namespace,
    params: Any,
    mesh: jax.sharding.Mesh,
    corpus: np.ndarray,
    resumed_from: int | None,
) -> str:
    """Say what is about to run."""
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    what = (
        f"{args.size}: {parameters / 1e6:.1f} M parameters on {mesh.size} x "
        f"{mesh.devices.flat[0].device_kind}, {len(corpus) / 1e6:.1f} MB of Python"
    )
    if resumed_from is None:
        return f"{what}; starting fresh"
    return f"{what}; resumed from checkpoint {resumed_from} in {args.directory}"


def main() -> None:
    """Run the command line."""
    args = parse_arguments()
    corpus = data.load_corpus()
    # What decides the losses. The number of devices does not, up to rounding: resume on as many as
    # you have.
    settings = ("size", "dtype", "seed", "steps", "batch_size", "seq_len")
    try:
        journal.claim(
            args.directory,
            {name: getattr(args, name) for name in settings} | {"corpus": data.fingerprint(corpus)},
        )
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    mesh = sharding.local_mesh()
    with jax.set_mesh(mesh), make_manager(args) as manager:
        is_done = train(args, corpus, manager, mesh)
    if not is_done:
        print("stopped by SIGTERM, and saved; start it again to go on", file=sys.stderr)
        sys.exit(EXIT_STOPPED)


if __name__ == "__main__":
    main()
