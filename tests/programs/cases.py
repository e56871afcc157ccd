"""Which programs are played on how many devices."""

from __future__ import annotations

import os

from . import PROGRAMS

IS_CAMPAIGN = "GOCKPT_INVARIANTS" in os.environ
# In `make test` each program is played once: on the mesh, if the placement of what is special in it
# may matter. `make invariants` plays all on both, and `make lives` random lives of them.
ON_ONE_DEVICE = (
    "lion", "sgd_momentum", "rmsprop", "muon", "multisteps", "inject_hyperparams", "schedule_free",
    "l2_adam", "adabelief", "nadamw", "ademamix", "apply_if_finite", "ema", "loss_scale",
    "param_edit", "frozen", "zero_size", "tied_embedding", "loss_first", "donate_argnames",
    "static_argnums", "static_argnames", "multi_transform", "adam_bf16_moments", "dict_state",
    "nested_tuple", "rng_argument", "retained",
)  # fmt: skip
ON_BOTH = ("clip_adamw",)
CASES = [
    (name, devices)
    for name in PROGRAMS
    for devices in (1, 8)
    if IS_CAMPAIGN or name in ON_BOTH or devices == (1 if name in ON_ONE_DEVICE else 8)
]
