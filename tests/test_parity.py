"""A stock manager and ours live the same random life: what they say, keep and restore is the same.

`make parity` lives 60 of them. What differs by design (docs/integrations.md) has no place in them.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from campaigns import seeds
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import checkpoint_managers as policies

from gockpt_jax import GoCkptManager

LIVES = seeds("PARITY") or (1,)  # the first is one of trees
A = ocp.args
P = PartitionSpec


def state(label: int) -> dict[str, Any]:
    """Every kind of leaf that both save alike."""
    devices = np.array(jax.devices())
    wide, tall = (Mesh(devices.reshape(s), ("x", "y")) for s in ((2, 4), (4, 2)))
    values = np.arange(64.0, dtype=np.float32).reshape(8, 8) + label
    return {
        "wide": jax.device_put(values, NamedSharding(wide, P("x", "y"))),
        "tall": jax.device_put(values, NamedSharding(tall, P("x", "y"))),
        "both": jax.device_put(values, NamedSharding(wide, P(("y", "x")))),
        "replicated": jax.device_put(values, NamedSharding(tall, P())),
        "third": jax.device_put(jnp.arange(3), devices[3]),
        "half": jnp.full(5, label, jnp.bfloat16),
        "keys": jax.random.split(jax.random.key(label), 3),
        "nested": [np.arange(3) + label, (label, 0.5), {}, None, np.asfortranarray(values[:2])],
    }


def options(rng: random.Random) -> ocp.CheckpointManagerOptions:
    """Options that go together; the same for the same state of `rng`."""
    chosen: dict[str, Any] = {}
    for name, values in {
        "save_interval_steps": [2, 3], "max_to_keep": [1, 3], "keep_period": [2, 3],
        "step_prefix": ["p"], "step_format_fixed_length": [4], "save_on_steps": [[3, 5]],
        "enable_async_checkpointing": [False], "todelete_subdir": ["gone"],
        "lightweight_initialize": [True], "cleanup_tmp_directories": [True],
        "single_host_load_and_broadcast": [True], "save_root_metadata": [False],
        "prevent_write_metrics": [True],
        "async_options": [ocp.options.AsyncOptions(create_directories_asynchronously=False)],
        "should_save_fn": [lambda label, last: label % 2 == 1 or (last or 0) + 2 < label],
        "save_decision_policy": [
            policies.FixedIntervalPolicy(2),
            policies.AnySavePolicy(
                [policies.SpecificStepsPolicy((1, 4)), policies.InitialSavePolicy()]
            ),
            policies.ContinuousCheckpointingPolicy(minimum_interval_secs=3600),
            policies.AnySavePolicy(
                [
                    policies.SpecificStepsPolicy((2, 5)),
                    policies.ContinuousCheckpointingPolicy(minimum_interval_secs=3600),
                ]
            ),
        ],
    }.items():  # fmt: skip
        if rng.random() < 0.3:
            chosen[name] = rng.choice(values)
    if rng.random() < 0.3:
        chosen |= {"best_fn": lambda m: m["loss"], "best_mode": rng.choice(["min", "max"])}
    if rng.random() < 0.25:
        chosen = {k: v for k, v in chosen.items() if "keep" not in k and "best" not in k}
        chosen["preservation_policy"] = policies.AnyPreservationPolicy(
            [policies.EveryNSteps(3), policies.LatestN(rng.choice([1, 2]))]
        )
    return ocp.CheckpointManagerOptions(**chosen)


class Life:
    """What is done with a manager, drawn from a seed.

    Args:
      seed: Of the life.
      make: The manager's class.
      root: Its directory.
    """

    def __init__(self, seed: int, make: Any, root: Path):
        self._rng = random.Random(seed)
        self._options = options(self._rng)
        self._form = self._rng.choice(["bare", "bare", "named", "json"])
        kinds = [(A.StandardSave, A.StandardRestore), (A.PyTreeSave, A.PyTreeRestore)]
        self._save, self._restore = self._rng.choice(kinds)
        self._new = lambda: make(root, options=self._options, metadata={"of": "root"})
        self._manager = self._new()
        self._label = 0

    def told(self) -> list[tuple[str, Any]]:
        """Lives it; what each deed was, and what came of it."""
        deeds = [self.save] * 9 + [
            self.steps, self.delete, self.reopen, self.reload, self.known, self.restore,
            self.restore_into,
        ]  # fmt: skip
        drawn = [self.save, *self._rng.choices(deeds, k=14), self.steps, self.restore, self.reopen]
        with_end = [*drawn, self.steps, self.known, self.restore, self.restore_into]
        told = []
        for deed in with_end:
            try:
                if deed != self.save:
                    self._manager.wait_until_finished()
                told.append((deed.__name__, said(deed())))
            # TypeError: policies by time subtract dates that know their zone from such that do not.
            except (ValueError, OSError, KeyError, TypeError) as error:
                kind = next(t for t in type(error).__mro__ if t.__module__ == "builtins")
                told.append((deed.__name__, kind))
        self._manager.close()
        return told

    def save(self) -> Any:
        label, self._label = self._label, self._label + self._rng.choice([0, 1, 1, 1, 2])
        metrics = {"loss": float(label * 7 % 5)} if self._rng.random() < 0.8 else None
        custom = {"label": label} if self._rng.random() < 0.3 else None
        forced = self._rng.random() < 0.15
        args = A.JsonSave({"n": label}) if self._form == "json" else self._save(state(label))
        if self._form == "named":
            args = A.Composite(model=args, cursor=A.JsonSave({"n": label}))
        return self._manager.save(
            label, args=args, metrics=metrics, force=forced, custom_metadata=custom
        )

    def steps(self) -> Any:
        m = self._manager
        asked = (m.all_steps(), m.all_steps(read=True), m.latest_step(), m.best_step())
        return [*asked, m.should_save(self._label)]

    def delete(self) -> Any:
        return self._manager.delete(max(0, self._label - self._rng.choice([1, 2, 3])))

    def reopen(self) -> Any:
        self._manager.close()
        self._manager = self._new()
        return self._manager.all_steps()

    def reload(self) -> Any:
        return self._manager.reload()

    def known(self) -> Any:
        step = self._rng.choice(self._manager.all_steps() or [0])
        found = self._manager.metadata(step)
        root = self._manager.metadata().custom_metadata
        return [found.custom_metadata, found.metrics, self._manager.metrics(step), root]

    def restore(self) -> Any:
        return self._restored(None)

    def restore_into(self) -> Any:
        if self._form == "json":
            return self._restored(A.JsonRestore())
        target = state(0)
        if self._restore is A.StandardRestore:
            return self._restored(A.StandardRestore(target))
        places = ocp.checkpoint_utils.construct_restore_args(target)
        return self._restored(A.PyTreeRestore(target, restore_args=places))

    def _restored(self, args: Any) -> Any:
        step = self._rng.choice([None, *self._manager.all_steps()])
        if self._form == "named" and args is not None:
            args = A.Composite(model=args, cursor=A.JsonRestore())
        return self._manager.restore(step, args=args)


def said(x: Any) -> Any:
    """Something that can be compared: types, bytes and places instead of arrays."""
    if isinstance(x, A.Composite):
        return "composite", {k: said(v) for k, v in x.items()}
    if isinstance(x, dict):
        return {k: said(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return type(x), [said(v) for v in x]
    if isinstance(x, jax.Array | np.ndarray):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        data = np.asarray(jax.random.key_data(x) if is_key else x)
        place = getattr(x, "sharding", None)
        return type(x), x.dtype, x.shape, data.tobytes(), place
    return x


@pytest.mark.filterwarnings("ignore:Sharding info not provided", "ignore:.*metrics.*")
@pytest.mark.parametrize("seed", LIVES)
def test_random_lives(seed: int, tmp_path: Path) -> None:
    stock = Life(seed, ocp.CheckpointManager, tmp_path / "stock").told()
    ours = Life(seed, GoCkptManager, tmp_path / "ours").told()
    for mine, theirs in zip(ours, stock, strict=True):
        assert mine == theirs
    names = [sorted(p.name for p in (tmp_path / d).iterdir()) for d in ("ours", "stock")]
    assert names[0] == names[1]
