"""A small model on the meshes of a job, and a loop that keeps what it has given to `save`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1

import gockpt_jax as gockpt
from gockpt_jax.v1 import GoCkptCheckpointable

INTERVAL, WINDOW_STEPS = 4, 3  # Windows of saves 4, 8, ... ; the first, of save 0, is a snapshot.
SIZES = {"w": (48, 48), "u": (48, 24), "b": (48,)}  # Two, three, four, ... devices divide them.

# Each mesh: its axes with their sizes, given the number of devices, and where parameters lie; and
# the optimizer's leaves, if these lie elsewhere.
MESHES: dict[str, tuple[Any, dict[str, P]]] = {
    "fsdp": (lambda n: {"fsdp": n}, {"w": P("fsdp"), "u": P("fsdp"), "b": P("fsdp")}),
    "data_parallel": (lambda n: {"data": n}, {"w": P(), "u": P(), "b": P()}),
    "zero_1": (lambda n: {"data": n}, {"opt/w": P("data"), "opt/u": P("data")}),
    "tensor": (lambda n: {"tensor": n}, {"w": P(None, "tensor"), "u": P("tensor"), "b": P()}),
    "fsdp_tensor": (
        lambda n: {"fsdp": n // 2, "tensor": 2},
        {"w": P("fsdp", "tensor"), "u": P("tensor", "fsdp"), "b": P("tensor")},
    ),
    "by_hand": (lambda n: {"fsdp": n}, {"w": P("fsdp"), "u": P("fsdp"), "b": P("fsdp")}),
    "by_hand_whole": (lambda n: {"data": n}, {}),
    "cut_across": (lambda n: {"fsdp": n}, {"w": P("fsdp"), "u": P("fsdp"), "b": P("fsdp")}),
    "whole_across": (lambda n: {"fsdp": n}, {}),
    "each_its_own": (lambda n: {"data": n}, dict.fromkeys((*SIZES, "count"), P("data"))),
}
BY_HAND = ("by_hand", "by_hand_whole", "each_its_own")
"""Whose step is one `shard_map`; in the last each device has a state of its own, as in `pmap`."""

ACROSS = P(None, "fsdp")
"""How the gradients of two matrices lie that are cut the other way, or not at all."""

OPTIMIZERS = {
    "zero_1": optax.sgd(1e-2, momentum=0.9),  # Momentum and parameter are one group.
    # A number of the step is captured, by which every process repeats its part of the updates.
    "tensor": optax.inject_hyperparams(optax.sgd)(
        1e-2, momentum=optax.linear_schedule(0.9, 0.5, 10)
    ),
}

# One of each kind on two processes, and on four.
MESHES_OF = {2: ("fsdp", "tensor"), 4: ("data_parallel", "fsdp_tensor")}


class Loop:
    """One training loop with a manager; `label` is that of the next update.

    Args:
        directory: Of the checkpoints.
        mesh: A name in `MESHES`.
        window: Of three steps by default.
        handler: For a stock manager instead of ours.
        checkpointable: For a `Checkpointer` of v1, which then has the last word on what is saved.
        layout: On disk, as `pytree_options` of our manager.
        **options: Of `ocp.CheckpointManagerOptions`; every fourth label is saved by default.
    """

    def __init__(
        self,
        directory: Path,
        mesh: str = "fsdp",
        *,
        window: gockpt.WindowOptions | None = None,
        handler: gockpt.GoCkptHandler | None = None,
        checkpointable: GoCkptCheckpointable | None = None,
        layout: Any = None,
        **options: Any,
    ) -> None:
        self.interval = options.setdefault("save_interval_steps", INTERVAL)
        stock = ocp.CheckpointManagerOptions(**options)
        if checkpointable is not None:
            self.manager = _Checkpointer(directory, checkpointable)
            self.face: Any = checkpointable
        elif handler is None:
            window = window or gockpt.WindowOptions(steps=WINDOW_STEPS)
            self.manager = gockpt.GoCkptManager(
                directory, options=stock, window=window, pytree_options=layout
            )
            self.face = self.manager
        else:
            self.manager = ocp.CheckpointManager(directory, item_handlers=handler, options=stock)
            self.face = handler
        self.directory = directory
        rows = P(None if mesh == "tensor" else next(iter(make_mesh(mesh).shape)))
        self._rows = NamedSharding(make_mesh(mesh), rows)
        init, self.users_step = _job(mesh)
        self.state, self.step = init(), self.face.wrap(self.users_step)
        self.label = 0
        self.rows_of: Callable[[int], int] = lambda label: 24  # of its batch
        self.given: dict[int, dict[str, np.ndarray]] = {}

    @property
    def session(self) -> Any:
        """What opens the windows."""
        return self.face._gockpt_session

    def update(self) -> None:
        """Makes one update."""
        self.state, _ = self.step(self.state, self.batch())
        self.label += 1

    def batch(self) -> jax.Array:
        """That of the next update: of global rows, or made of what each process has of them."""
        x = np.random.default_rng(self.label).standard_normal(
            (self.rows_of(self.label), 48), np.float32
        )
        if self.label % 2 or not self._rows.spec[0]:
            return jax.make_array_from_callback(x.shape, self._rows, lambda i: x[i])
        mine = self._rows.addressable_devices_indices_map(x.shape).values()
        parts = sorted({i[0].indices(len(x))[:2] for i in mine if i is not None})
        rows = np.concatenate([x[slice(*part)] for part in parts])
        return jax.make_array_from_process_local_data(self._rows, rows, x.shape)

    def save(self, **kwargs: Any) -> bool:
        """Calls `save` for the last update, and remembers what it was given."""
        label = self.label - 1
        # Not of what will not be saved: that waits for the step, which for the other process's.
        given = None if label % self.interval else shards_of(self.state)
        kwargs.setdefault("args", gockpt.GoCkptSave(self.state))
        accepted = self.manager.save(label, **kwargs)
        if accepted:
            self.given[label] = given or shards_of(self.state)
        return accepted

    def run(self, last: int) -> None:
        """Updates and saves up to a label, which is the last one."""
        while self.label <= last:
            self.update()
            self.save()

    def report(self, label: int) -> gockpt.SaveReport:
        """The report of a label's save."""
        (found,) = [report for report in self.face.reports if report.step == label]
        return found

    def keep(self) -> None:
        """Leaves on disk what this process gave to `save`, for whoever reads the checkpoints."""
        self.manager.wait_until_finished()
        folder = self.directory.with_name(self.directory.name + "_given")
        folder.mkdir(exist_ok=True)
        for label, shards in self.given.items():
            np.savez(folder / f"{label}_{jax.process_index()}.npz", **shards)


class _Checkpointer:
    """One of v1 with a manager's methods; every fourth label is saved."""

    def __init__(self, directory: Path, checkpointable: GoCkptCheckpointable) -> None:
        policy = v1.training.save_decision_policies.FixedIntervalPolicy(INTERVAL)
        self.checkpointer = v1.training.Checkpointer(directory, save_decision_policy=policy)
        self._checkpointable = checkpointable
        self._response: Any = None

    def save(self, label: int, args: Any) -> bool:
        """Saves one label blocking, the next in the background."""
        items = {"state": self._checkpointable(args.item)}
        if label % (2 * INTERVAL):
            return bool(self.checkpointer.save_checkpointables(label, items))
        response = self.checkpointer.save_checkpointables_async(label, items)
        self._response = response or self._response
        return response is not None

    def wait_until_finished(self) -> None:
        """Waits for the save in the background."""
        self._response.result()

    def close(self) -> None:
        """Closes the `Checkpointer` and the checkpointable."""
        try:
            self.checkpointer.close()
        finally:
            self._checkpointable.close()


@functools.cache
def make_mesh(name: str) -> Mesh:
    """The mesh of all devices of the job."""
    axes = MESHES[name][0](jax.device_count())
    kinds = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds)


@functools.cache
def _job(mesh: str) -> tuple[Any, Any]:
    """A function that makes the first state, and the jitted step; one of each for all loops."""
    tx = optimizer(mesh)

    def init() -> Any:
        params = {
            name: jnp.sin(jnp.arange(math.prod(shape), dtype=jnp.float32)).reshape(shape)
            for name, shape in SIZES.items()
        }
        return {"params": params, "opt": tx.init(params)}

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) @ params["u"] - 1.0) ** 2)

    def train_step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], x)
        if mesh.endswith("_across"):
            across = NamedSharding(make_mesh(mesh), ACROSS)
            for name in ("w", "u"):
                grads[name] = jax.lax.with_sharding_constraint(grads[name], across)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    if mesh == "each_its_own":
        one, copies = init, jax.device_count()
        init = lambda: jax.tree.map(lambda x: jnp.stack([x] * copies), one())  # noqa: E731
    shardings = jax.tree.map(lambda x: x.sharding, place(jax.eval_shape(init), mesh))
    if mesh in BY_HAND:
        train_step = _by_hand(mesh, jax.tree.map(lambda x: x.spec, shardings), loss_fn)
    # Then what the host holds is taken for what lies on all devices, as it does.
    given = {"in_shardings": (shardings, None)} if mesh == "whole_across" else {}
    step = jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None), **given)
    return jax.jit(init, out_shardings=shardings), step


def _by_hand(mesh: str, specs: Any, loss_fn: Callable[..., jax.Array]) -> Callable[..., Any]:
    """The train step as one `shard_map`: parameters are gathered, their gradients scattered."""
    tx, axis, parts = optimizer(mesh), next(iter(make_mesh(mesh).shape)), jax.device_count()
    gathered = jax.tree.map(lambda spec: mesh == "by_hand" and bool(spec), specs["params"])

    def train_step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        if mesh == "each_its_own":
            state = jax.tree.map(lambda x: x[0], state)

        def loss_of(params: Any) -> jax.Array:
            whole = jax.tree.map(
                lambda p, is_part: jax.lax.all_gather(p, axis, tiled=True) if is_part else p,
                params, gathered,
            )  # fmt: skip
            return loss_fn(whole, x)

        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        grads = jax.tree.map(
            lambda g, is_part: g / parts if is_part else jax.lax.pmean(g, axis), grads, gathered
        )
        updates, opt = tx.update(grads, state["opt"], state["params"])
        state = {"params": optax.apply_updates(state["params"], updates), "opt": opt}
        if mesh == "each_its_own":
            state = jax.tree.map(lambda x: x[None], state)
        return state, jax.lax.pmean(loss, axis)

    return jax.shard_map(
        train_step, mesh=make_mesh(mesh), in_specs=(specs, P(axis)), out_specs=(specs, P()),
        check_vma=False,
    )  # fmt: skip


def optimizer(mesh: str) -> optax.GradientTransformation:
    """The optimizer of the jobs on a mesh."""
    adamw = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    return OPTIMIZERS.get(mesh, adamw)


def place(tree: Any, mesh: str) -> Any:
    """A tree of arrays, or of their specifications, on another mesh."""
    specs = MESHES[mesh][1]

    def move(path: Any, leaf: Any) -> Any:
        first, name = (jax.tree_util.keystr((path[n],), simple=True) for n in (0, -1))
        spec = specs.get(f"{first}/{name}", specs.get(name, P())) if leaf.ndim else P()
        sharding = NamedSharding(make_mesh(mesh), spec)
        if isinstance(leaf, jax.Array):
            return jax.device_put(leaf, sharding)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(move, tree)


def abstract(tree: Any) -> Any:
    """What to restore into."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def abstract_state(mesh: str, of: str | None = None) -> Any:
    """The state's shapes on the mesh of all devices of this process or job.

    Args:
        mesh: Where it is to lie.
        of: The mesh of the job that it comes from, if that has another optimizer.
    """
    return abstract(place(jax.eval_shape(_job(of or mesh)[0]), mesh))


def shards_of(tree: Any) -> dict[str, np.ndarray]:
    """The local shards of a tree, by path and place: `path|start:stop,start:stop`."""
    found = {}
    for path, array in jax.tree_util.tree_flatten_with_path(tree)[0]:
        for shard in array.addressable_shards:
            spans = (s.indices(n)[:2] for s, n in zip(shard.index, array.shape, strict=True))
            where = ",".join(f"{start}:{stop}" for start, stop in spans)
            found[f"{jax.tree_util.keystr(path)}|{where}"] = np.array(shard.data)
    return found
