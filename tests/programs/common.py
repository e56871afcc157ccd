"""What the programs share: the interface, the mesh and its layout, batches, and one small model."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import hurry
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

P = PartitionSpec

LEARNING_RATE = 1e-2  # Large, so that a few steps move every leaf by much more than rounding.
BATCH, INPUTS, IDS, CLASSES = 16, 20, 36, 7

# Parameter path -> layout on the (4, 2) mesh. An optimizer's path ends with that of its parameter,
# so moments follow their parameters. Without `out_shardings` the partitioner lays out the new state
# as it likes; these layouts are such that it likes them, so that one compilation does. One of them
# is spelt as users do, ("fsdp", None): the new state's sharding is equivalent then, but not equal.
RULES: tuple[tuple[str, PartitionSpec], ...] = (
    (r"layers/block/up/kernel$", P(None, "fsdp", "tensor")),  # of scanned layers, in front of all
    (r"layers/block/qkv/kernel$", P(None, None, "tensor")),
    (r"layers/block/up/bias$", P(None, "tensor")),
    (r"layers/block/(down|proj)/kernel$", P(None, "fsdp")),
    (r"(Embed_0/embedding|(Dense_1|up)/kernel)$", P("fsdp", "tensor")),
    (r"(Dense_0|qkv)/kernel$", P(None, "tensor")),
    (r"((Dense_2|down|proj)/kernel|tokens/embedding|Dense_1/bias|table)$", P("fsdp")),
    (r"position/embedding$", P("fsdp", None)),
    (r"(first/kernel|(Dense_0|up)/bias|BatchNorm_0/\w+)$", P("tensor")),
)


@dataclasses.dataclass
class Job:
    """A program ready to run: its state, its step, and how a loop calls the step."""

    state: Any
    step: Any
    advance: Callable[[Callable[..., Any], Any, int], Any]
    wrap_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Program:
    """A named training program; `build(devices)` makes the same job, with fresh buffers, again."""

    name: str
    build: Callable[[int], Job]
    marks: frozenset[str] = frozenset()


class Registry(dict[str, Program]):
    """The programs of one family, by name."""

    def add(self, name: str, setup: Callable[[Layout], Job], *marks: str) -> None:
        """Register `setup`, which returns a job whose `state` is a function that makes the state.

        `setup` runs once per number of devices, so all builds share one jitted step, one optimizer
        and one model. Otherwise each build would compile anew, since jit caches by function.
        """
        setup_once = functools.cache(lambda devices: setup(Layout(devices)))

        def build(devices: int) -> Job:
            job = setup_once(devices)
            return dataclasses.replace(job, state=job.state(), wrap_kwargs=dict(job.wrap_kwargs))

        if name in self:
            raise ValueError(f"two programs are named {name!r}")
        self[name] = Program(name, build, frozenset(marks))

    def program(self, *marks: str) -> Callable[[Callable[[Layout], Job]], Callable[[Layout], Job]]:
        """Register the decorated setup function under its own name."""

        def register(setup: Callable[[Layout], Job]) -> Callable[[Layout], Job]:
            self.add(setup.__name__, setup, *marks)
            return setup

        return register


class Layout:
    """Where things live: device 0 without a mesh, or eight devices as ('fsdp', 'tensor')."""

    def __init__(self, devices: int):
        self.mesh: Mesh | None = None
        if devices > 1:
            axes = ("fsdp", "tensor")
            self.mesh = jax.make_mesh((devices // 2, 2), axes, axis_types=(AxisType.Auto,) * 2)

    def sharding(self, *spec: str | None) -> jax.sharding.Sharding:
        """Return the sharding of one array; on one device that device, whatever the spec."""
        if self.mesh is None:
            return SingleDeviceSharding(jax.devices()[0])
        return NamedSharding(self.mesh, P(*spec))

    def shardings(self, tree: Any) -> Any:
        """Return the tree of shardings that RULES give to the arrays (or shapes) in `tree`."""
        return jax.tree_util.tree_map_with_path(self._leaf_sharding, tree)

    def _leaf_sharding(self, path: tuple[Any, ...], leaf: Any) -> jax.sharding.Sharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        spec = next((spec for pattern, spec in RULES if re.search(pattern, name)), P())
        # Row and column sums of factored optimizers carry a parameter's name but not its shape.
        fits = len(spec) <= len(leaf.shape) and all(
            axis is None or size % self.mesh.shape[axis] == 0
            for axis, size in zip(spec, leaf.shape, strict=False)
            if self.mesh is not None
        )
        return self.sharding(*(spec if fits else ()))

    def maker(self, init: Callable[[], Any]) -> Callable[[], Any]:
        """Return a function that makes `init()` anew, laid out by RULES, in buffers of its own.

        On one device the arrays stay uncommitted, as a user gets them from `model.init`.
        """
        placed = {}
        if self.mesh is not None:
            placed["out_shardings"] = self.shardings(jax.eval_shape(init))
        return jax.jit(init, compiler_options=hurry.OPTIONS, **placed)

    def put(self, batch: Mapping[str, np.ndarray]) -> Any:
        """Place a batch: split over 'fsdp', or uncommitted on one device."""
        return jax.device_put(batch, None if self.mesh is None else self.sharding("fsdp"))

    def batch(self, n: int) -> Any:
        """Return batch `n`."""
        return self.put(numpy_batch(n))

    def bad_batch(self, n: int) -> Any:
        """Return batch `n`, spoilt by an infinity where `is_bad(n)`."""
        batch = numpy_batch(n)
        if is_bad(n):
            batch["x"][3, 5] = np.inf
        return self.put(batch)


def is_bad(n: int) -> bool:
    """Tell which batches have no finite loss in programs marked "skips"."""
    return n % 3 == 1


def numpy_batch(n: int) -> dict[str, np.ndarray]:
    """Return batch `n` on the host, with labels that can be learnt from `ids`."""
    rng = np.random.default_rng(n)
    ids = rng.integers(0, IDS, BATCH, dtype=np.int32)
    x = rng.standard_normal((BATCH, INPUTS), np.float32)
    return {"x": x, "ids": ids, "y": ids % CLASSES}


class MLP(nn.Module):
    """An embedding and three dense layers of uneven widths, with optional norm and dropout."""

    batch_norm: bool = False
    dropout: float = 0.0

    @nn.compact
    def __call__(self, batch: Any, train: bool = True) -> jax.Array:
        h = nn.Dense(48)(batch["x"]) + nn.Embed(IDS, 48)(batch["ids"])
        if self.batch_norm:
            h = nn.BatchNorm(use_running_average=not train, momentum=0.9)(h)
        h = nn.Dense(40)(nn.gelu(h))
        # How often each unit is active: collected only by a step that asks for "stats".
        self.sow("stats", "load", (h > 0).mean(0), reduce_fn=lambda _, new: new)
        h = nn.Dropout(self.dropout, deterministic=not train)(nn.gelu(h))
        return nn.Dense(CLASSES)(h)


MODEL = MLP()


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean cross entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """Return the loss of the plain model."""
    return cross_entropy(MODEL.apply({"params": params}, batch), batch["y"])


grad_fn = jax.value_and_grad(loss_fn)


@functools.cache
def _host_variables(model: nn.Module) -> Any:
    with jax.ensure_compile_time_eval():  # The caller is being traced.
        init = jax.jit(functools.partial(model.init, train=False), compiler_options=hurry.OPTIONS)
        return jax.tree.map(np.asarray, init(jax.random.key(0), numpy_batch(0)))


def init_variables(model: nn.Module = MODEL) -> Any:
    """Return a model's variables, for use inside `Layout.maker`.

    They are computed once per model and become constants of the function that makes a state, which
    spares every program the compilation of the random initializers.
    """
    variables = jax.tree.map(jnp.asarray, _host_variables(model))
    return {name: tree for name, tree in variables.items() if name != "stats"}


def init_params() -> Any:
    """Return the parameters of the plain model."""
    return init_variables()["params"]


def make_job(
    layout: Layout,
    init: Callable[[], Any],
    step: Callable[..., Any],
    batch: Callable[[int], Any] | None = None,
) -> Job:
    """Return the job of a step `(state, batch) -> (state, metrics)` that donates its state."""
    batch = batch or layout.batch
    jitted = jax.jit(step, donate_argnums=0)
    return Job(layout.maker(init), jitted, lambda f, state, n: f(state, batch(n))[0])


def init_train_state(tx: optax.GradientTransformation) -> TrainState:
    """Return a linen train state of the plain model."""
    return TrainState.create(apply_fn=MODEL.apply, params=init_params(), tx=tx)


def make_train_step() -> Callable[..., Any]:
    """Return the step of a linen tutorial: a new function each time, as jit caches by function."""

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
        loss, grads = grad_fn(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    return train_step
