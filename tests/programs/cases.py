"""Which programs are played on how many devices."""

from __future__ import annotations

import os

from . import PROGRAMS

IS_CAMPAIGN = "GOCKPT_INVARIANTS" in os.environ
# In `make test` a program is played once: on the mesh, if where things lie in it may
# matter. `make invariants` plays all on both, and `make lives` random lives of them.
ON_ONE_DEVICE = (
    "adan", "lion", "muon", "multisteps", "schedule_free", "apply_if_finite", "ema",
    "loss_scale",
    "param_edit", "frozen", "zero_size", "tied_embedding", "loss_first", "donate_argnames",
    "static_argnames", "adam_bf16_moments", "dict_state",
    "rng_argument", "retained", "params_opt_state", "state_alone", "python_int_step",
)  # fmt: skip
ON_BOTH = ("clip_adamw",)
# Others like them are: what is cut of optimizers has tests of its own.
NOT_PLAYED = (
    "sgd_momentum", "rmsprop", "inject_hyperparams", "l2_adam", "adabelief", "nadamw", "ademamix",
    "dropout_raw_key", "static_argnums", "nested_tuple", "one_layer", "adamw", "multi_transform",
    "numpy_batches",
)  # fmt: skip


def _is_played(name: str, devices: int) -> bool:
    return name not in NOT_PLAYED and (
        name in ON_BOTH or devices == (1 if name in ON_ONE_DEVICE else 8)
    )


CASES = [
    (name, devices)
    for name in PROGRAMS
    for devices in (1, 8)
    if IS_CAMPAIGN or _is_played(name, devices)
]
