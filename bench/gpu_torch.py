"""PyTorch's asynchronous distributed checkpoint on the same GPU, in units of its own transfer."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.record import Record

_TENSOR_BYTES = 2**28
_SAVES = 3

NOTES = [
    "torch/stall_in_transfers: seconds until `torch.distributed.checkpoint.async_save` returned, "
    "over those of copying the same tensors into pinned memory that was there already. The first "
    "save, which allocates, is torch/first_stall_in_transfers. Nothing trains meanwhile, and the "
    "process group has one member.",
]


def run(
    record: Record, *, state_bytes: int, directory: Path | None, is_over: Callable[[], bool]
) -> None:
    """Measures it.

    Args:
      record: Takes figures.
      state_bytes: Of the tensors; fp32.
      directory: For its checkpoints; the temporary directory if `None`.
      is_over: Whether the time is.
    """
    try:
        import torch
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
    except ImportError as error:
        record.notes.append(f"torch: not measured, {error}.")
        return
    record.notes += NOTES
    device = "cuda" if torch.cuda.is_available() else "cpu"
    count = max(1, state_bytes // _TENSOR_BYTES)
    size = state_bytes // count // 4
    state = {f"tensor_{n}": torch.rand(size, device=device) for n in range(count)}
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
            init_method=f"file://{scratch}/group", rank=0, world_size=1,
        )  # fmt: skip
        try:
            transfer = min(_transfer_secs(torch, state, device) for _ in range(3))
            record.samples["torch/state_bytes"] = [float(4 * size * count)]
            record.samples["torch/transfer_secs"] = [transfer]
            for n in range(_SAVES):
                if n and is_over():
                    break
                stall = _stall_secs(dcp, state, f"{scratch}/{n}")
                name = "stall_in_transfers" if n else "first_stall_in_transfers"
                record.samples.setdefault(f"torch/{name}", []).append(stall / transfer)
        finally:
            dist.destroy_process_group()


def _transfer_secs(torch: Any, state: dict[str, Any], device: str) -> float:
    hosts = [torch.empty_like(x, device="cpu", pin_memory=device == "cuda") for x in state.values()]
    secs = []
    for _ in range(2):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for host, x in zip(hosts, state.values(), strict=True):
            host.copy_(x, non_blocking=True)
        if device == "cuda":
            torch.cuda.synchronize()
        secs.append(time.perf_counter() - start)
    return min(secs)


def _stall_secs(dcp: Any, state: dict[str, Any], path: str) -> float:
    start = time.perf_counter()
    saving = dcp.async_save({"state": state}, checkpoint_id=path)
    secs = time.perf_counter() - start
    getattr(saving, "upload_completion", saving).result()
    return secs
