"""How tests compile that time nothing: compilation is most of their work, and of little use to it.

LLVM does not optimize, and loops are emitted as its instructions at once, in one module. Emitted by
way of MLIR, as XLA does otherwise, each costs more than all that LLVM does with it; each module
costs a target machine. XLA fuses a little differently then, so the campaigns, `make thorough` and
`make test HURRY=` compile as users do, all but jobs of several processes and the examples.
"""

import os

OPTIONS: dict[str, str | bool | int] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
"""As `compiler_options` of `jax.jit`."""

FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in OPTIONS.items())
"""As a part of `XLA_FLAGS`."""

IS_ASKED_FOR = bool(os.environ.get("GOCKPT_HURRY"))
"""By `make test`, of this process and of all that it starts."""
