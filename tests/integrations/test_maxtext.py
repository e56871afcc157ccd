"""MaxText's loop: one item, `items`, saved by a `CheckpointManager` or by v1's `Checkpointer`.

The state's layout comes from logical axes and goes to `jax.jit` on both sides; the state is
donated; `block_until_ready` comes before a save, and timings go into the metrics behind it.
"""

from __future__ import annotations

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from orbax.checkpoint import v1

import gockpt_jax.v1
from integrations.loops import WINDOW, assert_same, bits, run_both

RULES = (("batch", ("data", "fsdp")), ("embed", "fsdp"))
BATCH = PartitionSpec(("data", "fsdp"))
VOCABULARY, LENGTH, PERIOD = 32, 8, 5


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        def kernel(*axes):
            return nn.with_logical_partitioning(nn.initializers.normal(0.1), axes)

        x = nn.Embed(VOCABULARY, 16, embedding_init=kernel("vocab", "embed"))(tokens)
        x = nn.with_logical_constraint(x, ("batch", None, None))
        x = x + nn.Dense(16, kernel_init=kernel("mlp", "embed"))(
            nn.gelu(nn.Dense(32, kernel_init=kernel("embed", "mlp"))(x))
        )
        return nn.Dense(VOCABULARY, kernel_init=kernel("embed", "vocab"))(nn.LayerNorm()(x))


def create_orbax_checkpoint_manager(gockpt, directory):
    return gockpt.GoCkptManager(  # was: ocp.CheckpointManager(
        directory,
        item_names=("items",),
        options=ocp.CheckpointManagerOptions(create=True, save_interval_steps=PERIOD),
        window=WINDOW,  # new
    )


def maybe_save_checkpoint(manager, state, step=None):
    force = step is None  # the last save, at the end of the run
    step = int(state.step) - 1 if force else step
    if force and step in manager.all_steps():
        return
    if force or step % PERIOD == 0:
        jax.block_until_ready(state)  # windows do not need it: delete it, training then goes on
    args = ocp.args.Composite(items=ocp.args.PyTreeSave(item=state))
    manager.save(step, args=args, force=force)


def abstract(shapes, shardings):
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )


def load_state_if_possible(manager, shapes, shardings):
    step = manager.latest_step()
    if step is None:
        return None, 0
    target = abstract(shapes, shardings)
    restore_args = ocp.checkpoint_utils.construct_restore_args(target)
    args = ocp.args.PyTreeRestore(item=target, restore_args=restore_args)
    return manager.restore(step, args=ocp.args.Composite(items=args))["items"], step + 1


def train_step(state, batch, rng):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch)
        noise = 1e-2 * jax.random.normal(rng, logits.shape)
        losses = optax.softmax_cross_entropy_with_integer_labels(
            (logits + noise)[:, :-1], batch[:, 1:]
        )
        return losses.mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"scalar": {"learning/loss": loss}}


@functools.cache
def setup(mesh):
    model, tx = Transformer(), optax.adamw(1e-2, b1=0.9, b2=0.95)

    def init_state(rng):
        params = model.init(rng, jnp.zeros((8, LENGTH), int))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    boxed = jax.eval_shape(init_state, jax.random.key(0))
    state_mesh_shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, RULES)
    init = jax.jit(lambda rng: nn.unbox(init_state(rng)), out_shardings=state_mesh_shardings)
    p_train_step = jax.jit(
        train_step,
        in_shardings=(state_mesh_shardings, NamedSharding(mesh, BATCH), None),
        out_shardings=(state_mesh_shardings, None),
        donate_argnums=0,
    )
    return init, p_train_step, jax.eval_shape(init, jax.random.key(0)), state_mesh_shardings


def make_mesh():
    return jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def inputs(mesh, step):
    tokens = np.random.default_rng(step).integers(VOCABULARY, size=(8, LENGTH))
    batch = jax.device_put(tokens.astype(np.int32), NamedSharding(mesh, BATCH))
    return batch, jax.random.fold_in(jax.random.key(1), step)


def log(metrics, step):
    metrics["scalar"] |= {"perf/step": step, "perf/step_time_seconds": 0.1}


def train(directory, gockpt, steps=18):
    manager, mesh = create_orbax_checkpoint_manager(gockpt, directory), make_mesh()
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES), manager:
        init, p_train_step, shapes, state_mesh_shardings = setup(mesh)
        p_train_step = manager.wrap(p_train_step)  # new
        state, start_step = load_state_if_possible(manager, shapes, state_mesh_shardings)
        state = init(jax.random.key(0)) if state is None else state
        for step in np.arange(start_step, steps):  # labels are numpy's integers
            state, metrics = p_train_step(state, *inputs(mesh, step))
            maybe_save_checkpoint(manager, state, step)
            log(metrics, step)
        maybe_save_checkpoint(manager, state)
    return state, metrics


def test_maxtext(tmp_path):
    run = run_both(train, tmp_path)
    assert run.windows == [5, 10, 15]
    assert run.snapshots == [0, 17]  # the first, and the forced one at the end
    for later in (15, 17):
        shutil.rmtree(run.manager.directory / str(later))
    again = train(run.manager.directory, gockpt_jax)  # from label 10
    assert_same(bits(again), bits(run.final))


def train_by_v1(directory, windows, steps=18):
    """As MaxText 0.2.5 does: the loop decides, and v1 restores without us."""
    mesh, given = make_mesh(), {}
    policy = v1.training.save_decision_policies.FixedIntervalPolicy(PERIOD)
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        init, p_train_step, shapes, state_mesh_shardings = setup(mesh)
        if windows is not None:
            p_train_step = windows.wrap(p_train_step)  # new
        with v1.training.Checkpointer(directory, save_decision_policy=policy) as checkpointer:
            state, start_step = init(jax.random.key(0)), 0
            if checkpointer.latest is not None:
                label = checkpointer.latest.step
                target = {"items": abstract(shapes, state_mesh_shardings)}
                state = checkpointer.load_checkpointables(label, target)["items"]
                start_step = label + 1
            for step in range(start_step, steps):
                state, metrics = p_train_step(state, *inputs(mesh, step))
                force = step == steps - 1
                if force or step % PERIOD == 0:
                    jax.block_until_ready(state)
                    items = state if windows is None else windows(state)  # was: state
                    checkpointer.save_checkpointables_async(step, {"items": items}, force=force)
                    given[step] = bits(state)
                log(metrics, step)
    return state, given


@pytest.mark.skipif(
    not hasattr(v1.training.Checkpointer, "load"), reason="an older v1 (docs/integrations.md)"
)
@pytest.mark.thorough  # v1 has tests of its own
def test_maxtext_by_v1(tmp_path):
    with gockpt_jax.v1.GoCkptCheckpointable(window=WINDOW) as windows:
        final, given = train_by_v1(tmp_path, windows)
        kinds = {r.step: r.kind for r in windows.reports}
    assert kinds == {
        0: "snapshot", 5: "snapshot", 10: "window", 15: "window", 17: "snapshot"
    }  # fmt: skip
    alone, _ = train_by_v1(tmp_path / "stock", None)
    assert_same(bits(final), bits(alone))
    targets = jax.tree.map(ocp.utils.to_shape_dtype_struct, final)
    for label, want in given.items():
        loaded = v1.load(tmp_path / str(label), targets, checkpointable_name="items")
        assert_same(bits(loaded), want)
    for later in (15, 17):
        shutil.rmtree(tmp_path / str(later))
    again, _ = train_by_v1(tmp_path, None)  # from label 10, a window, without us
    assert_same(bits(again), bits(final))
