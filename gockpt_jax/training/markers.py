"""Optional markers that say which values are the gradients.

A marked program is cut exactly there; an unmarked one is cut by search (`cut.py`), which finds the
same place in every program we tried. The marker is `jax.ad_checkpoint.checkpoint_name`: a name in
the trace, nothing in the compiled program.
"""

from typing import Any

import jax
import optax
from flax.training.train_state import TrainState
from jax.ad_checkpoint import checkpoint_name

from gockpt_jax.checks import told

GRADIENT = "gockpt_gradient"


def mark_gradients(grads: Any) -> Any:
    """Names every array of a tree of gradients in the traced program; an identity.

    Args:
      grads: Any tree of arrays.

    Returns:
      The same tree.
    """
    return jax.tree.map(lambda g: checkpoint_name(g, GRADIENT), grads)


def retain(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Marks the gradients that an optax transformation is given.

    Args:
      tx: Any transformation; its state is unchanged.

    Returns:
      The same transformation, whose `update` names its incoming gradients.

    Raises:
      TypeError: if `tx` is none, such as `optax.adam` itself.

    Example:
      >>> import jax.numpy as jnp
      >>> tx = retain(optax.sgd(0.5))
      >>> updates, _ = tx.update({"w": jnp.ones(2)}, tx.init({"w": jnp.ones(2)}))
      >>> updates["w"].tolist()
      [-0.5, -0.5]
    """
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(
            f"`retain` takes an optax transformation, got {told(tx)}. Make it first, as in "
            "`retain(optax.adam(1e-3))`."
        )
    inner = optax.with_extra_args_support(tx)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        marked: tuple[Any, Any] = inner.update(mark_gradients(updates), state, params, **extra)
        return marked

    return optax.GradientTransformationExtraArgs(inner.init, update)


class GoCkptState(TrainState):  # type: ignore[misc]
    """`flax.training.train_state.TrainState`, the very same tree, with marked gradients.

    Example:
      >>> import jax.numpy as jnp
      >>> state = GoCkptState.create(apply_fn=None, params={"w": jnp.ones(2)}, tx=optax.sgd(0.5))
      >>> state = state.apply_gradients(grads={"w": jnp.ones(2)})
      >>> state.params["w"].tolist(), int(state.step)
      ([0.5, 0.5], 1)
    """

    def apply_gradients(self, *, grads: Any, **kwargs: Any) -> "GoCkptState":
        """Applies marked gradients; arguments and result are those of `TrainState`."""
        updated: GoCkptState = super().apply_gradients(grads=mark_gradients(grads), **kwargs)
        return updated
