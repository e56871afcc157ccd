"""Train a small language model in Flax NNX; stop it whenever you like; start it again.

    python examples/nnx_train.py --steps 60 --dir runs/nnx

Checkpoints leave the device during the few steps before each save. What differs from a loop around
`orbax.checkpoint.CheckpointManager` is marked (1) and (2). SIGTERM saves, and ends the run.
One that goes on reads its checkpoint with stock Orbax, to show that nothing else is needed. Needs
Flax 0.12 or newer.
"""

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from lm import data
from lm.arguments import at_least
from lm.preemption import EXIT_STOPPED, Preemption

import gockpt_jax as gockpt

VOCABULARY = 256  # bytes


class Block(nnx.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        self.norm_1 = nnx.LayerNorm(width, rngs=rngs)
        # No biases: softmax cancels that of the keys, whose gradient is rounding noise.
        self.attention = nnx.MultiHeadAttention(
            num_heads=2, in_features=width, decode=False, use_bias=False, rngs=rngs
        )
        self.norm_2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Transform `[batch, time, width]`."""
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norm_1(x), mask=mask)
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm_2(x)))))


class LanguageModel(nnx.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, *, width: int, layers: int, length: int, rngs: nnx.Rngs) -> None:
        self.tokens = nnx.Embed(VOCABULARY, width, rngs=rngs)
        self.positions = nnx.Embed(length, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs=rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Map integers `[batch, time]` to logits `[batch, time, VOCABULARY]`."""
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[-1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@functools.partial(nnx.jit, donate_argnames=("model", "optimizer"))
def train_step(model: LanguageModel, optimizer: nnx.Optimizer, batch: jax.Array) -> jax.Array:
    """Update model and optimizer in place; return the loss."""

    def loss_fn(model: LanguageModel) -> jax.Array:
        logits = model(batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=at_least(1), default=60, help="length of the run; more of them continue it")
    add("--dir", type=Path, default=Path("runs/nnx"), help="where the checkpoints are")
    add("--save-every", type=at_least(1), default=20, help="steps between checkpoints")
    add("--window", type=at_least(0), default=4, help="steps of a save's window; 0 = automatic")
    add("--width", type=at_least(1), default=128, help="of the network")
    add("--layers", type=at_least(0), default=2, help="of the network")
    add("--batch-size", type=at_least(1), default=8, help="excerpts per step")
    add("--length", type=at_least(1), default=64, help="bytes per excerpt")
    add("--seed", type=at_least(0), default=0, help="of parameters, dropout and batches")
    return parser.parse_args()


def build(args: argparse.Namespace) -> tuple[LanguageModel, nnx.Optimizer]:
    """Return model and optimizer before the first update."""
    rngs = nnx.Rngs(args.seed)
    model = LanguageModel(width=args.width, layers=args.layers, length=args.length, rngs=rngs)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, weight_decay=0.1))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def resume(directory: Path, trained: tuple[LanguageModel, nnx.Optimizer]) -> int:
    """Put the newest checkpoint, if there is one, into model and optimizer.

    All that it takes is in `nnx.state`: parameters, moments, dropout's keys and counts.

    Returns:
      The step to go on with.

    """
    if not directory.exists():
        return 0
    with ocp.CheckpointManager(directory) as stock:
        label = stock.latest_step()
        if label is None:
            return 0
        target = ocp.args.StandardRestore(nnx.state(trained))
        nnx.update(trained, stock.restore(label, args=ocp.args.Composite(state=target)).state)
    print(f"resumed from checkpoint {label}")
    return int(label) + 1


def make_manager(args: argparse.Namespace, directory: Path) -> gockpt.GoCkptManager:
    """Open the checkpoints of the run for writing."""
    return gockpt.GoCkptManager(  # (1) was: ocp.CheckpointManager(
        directory,
        options=ocp.CheckpointManagerOptions(save_interval_steps=args.save_every, max_to_keep=3),
        window=gockpt.WindowOptions(steps=args.window or None),
    )


def train(args: argparse.Namespace, corpus: np.ndarray) -> bool:
    """Go from wherever the directory stands to the last step, or until SIGTERM.

    Returns:
      Whether the last step was made.

    """
    preemption = Preemption()
    step = args.steps - 1  # of a directory that is there already
    directory = args.dir.resolve() / "checkpoints"
    model, optimizer = build(args)
    start = resume(directory, (model, optimizer))
    with make_manager(args, directory) as manager:
        step_fn: Any = manager.wrap(train_step, state=("model", "optimizer"))  # (2) the new line
        for step in range(start, args.steps):
            excerpts = data.batch(
                corpus, seed=args.seed, step=step, size=args.batch_size, length=args.length
            )
            loss = step_fn(model, optimizer, jnp.asarray(excerpts, jnp.int32))
            is_stopped = preemption.is_asked  # looked at once: it may change below
            last = is_stopped or step == args.steps - 1
            state = nnx.state((model, optimizer))
            manager.save(step, args=ocp.args.StandardSave(state), force=last)
            if step % 10 == 0 or last:
                print(f"step {step:4d}  loss {loss:.4f}", flush=True)
            if is_stopped:
                break
    for report in manager.reports:
        early = report.early_bytes / max(report.state_bytes, 1)
        print(
            f"checkpoint {report.step}: {report.kind}, K={report.window_steps}, {early:.0%} early"
        )
    return step == args.steps - 1


def main() -> None:
    """Run the command line."""
    if not train(parse_arguments(), data.load_corpus()):
        print("stopped by SIGTERM, and saved; start it again to go on", file=sys.stderr)
        sys.exit(EXIT_STOPPED)


if __name__ == "__main__":
    main()
