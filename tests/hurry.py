"""How tests compile that time nothing: compilation is most of their work, and of little use to it.

LLVM does not optimize, and loops are emitted as its instructions at once, in one module, where XLA
still can. Emitted by way of MLIR, as it does otherwise, each costs more than all that LLVM does
with it; each module costs a target machine. XLA fuses a little differently then, so the campaigns,
`make thorough` and `make test HURRY=` compile as users do, all but jobs of several processes and
the examples.
"""

import os
from importlib import metadata

from packaging.version import Version

OPTIONS: dict[str, str | bool | int] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
}
"""As `compiler_options` of `jax.jit`."""

if Version(metadata.version("jaxlib")) < Version("0.11.1"):
    # Later there are no emitters but MLIR's, and a flag that XLA does not know ends the process.
    OPTIONS["xla_cpu_use_fusion_emitters"] = False

FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in OPTIONS.items())
"""As a part of `XLA_FLAGS`."""

IS_ASKED_FOR = bool(os.environ.get("GOCKPT_HURRY"))
"""By `make test`, of this process and of all that it starts."""
