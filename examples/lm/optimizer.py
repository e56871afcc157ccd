"""AdamW with warm-up, cosine decay, clipping, and weight decay on matrices only."""

from typing import Any

import jax
import optax


def decay_mask(params: Any) -> Any:
    """Return True for the kernels: no decay on biases, norms and embeddings."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel", params)


def make_optimizer(steps: int, peak: float = 1e-3) -> optax.GradientTransformation:
    """Return the optimizer of a run of `steps` updates."""
    warmup = min(200, max(1, steps // 10))
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=peak,
        warmup_steps=warmup,
        decay_steps=max(steps, warmup + 1),
        end_value=0.1 * peak,
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=decay_mask),
    )
