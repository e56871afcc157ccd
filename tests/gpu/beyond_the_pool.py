"""Saves more than XLA may pin, and compares: `XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=1 python ... DIR`.

A process of its own, since XLA reads the limit when it starts.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import gockpt_jax as gockpt

SIZE = 2**27  # elements of each of three arrays: 1.6 GB in all


def main(directory: str, size: int = SIZE) -> None:
    """Trains, saves a snapshot and a window, and reads them again."""

    @jax.jit
    def train_step(state: dict[str, jax.Array]) -> dict[str, jax.Array]:
        grads = jnp.sin(state["w"])
        m = 0.5 * state["m"] + grads
        return {"w": jnp.cos(state["w"] - m), "m": m, "v": jnp.maximum(state["v"], grads)}

    given = {}
    options = ocp.CheckpointManagerOptions(save_interval_steps=4)
    # By default windows are put off where that memory has no room for them.
    window = gockpt.WindowOptions(steps=3, host_budget_bytes=8 * 10**9)
    with gockpt.GoCkptManager(directory, options=options, window=window) as manager:
        step = manager.wrap(train_step)
        state = {name: jnp.arange(size, dtype=jnp.float32) for name in "wmv"}
        for n in range(9):
            state = step(state)
            if manager.save(n, args=gockpt.GoCkptSave(state)):
                given[n] = jax.tree.map(np.array, state)
            manager.wait_until_finished()
        for n, saved in given.items():
            found = manager.restore(n, args=gockpt.GoCkptRestore(saved))
            jax.tree.map(np.testing.assert_array_equal, found, saved)
        print([report.window_steps for report in manager.reports])


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
