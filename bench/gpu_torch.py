"""PyTorch's asynchronous distributed checkpoint on the same device, beside its own transfer."""

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.record import Record

_TENSOR_BYTES = 2**28
_SAVES = 5

NOTES = [
    "torch/stall_in_transfers: seconds until `torch.distributed.checkpoint.async_save` returned, "
    "over those of copying the same tensors into memory that was there already, pinned on a GPU. "
    "The first save, which allocates, is torch/first_stall_in_transfers. torch/visible_secs: from "
    "the call until the checkpoint was there. Nothing trains meanwhile, and the process group has "
    "one member.",
]


def run(
    record: Record, *, state_bytes: int, directory: Path | None,
    is_over: Callable[[], bool] = lambda: False, saved: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Measures it.

    Args:
      record: Takes figures.
      state_bytes: Of the tensors; fp32.
      directory: For its checkpoints; the temporary directory if `None`.
      is_over: Whether the time is.
      saved: Called whenever there is a new figure.
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
    record.notes.append(f"torch {torch.__version__} on {_name(torch, device)}.")
    count = max(1, state_bytes // _TENSOR_BYTES)
    size = state_bytes // count // 4
    state = {f"tensor_{n}": torch.rand(size, device=device) for n in range(count)}
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
            init_method=f"file://{scratch}/group", rank=0, world_size=1,
        )  # fmt: skip
        try:
            _measure(record, torch, dcp, state, Path(scratch, "checkpoint"), is_over, saved)
        finally:
            dist.destroy_process_group()


def _measure(
    record: Record, torch: Any, dcp: Any, state: dict[str, Any], path: Path,
    is_over: Callable[[], bool], saved: Callable[[], None],
) -> None:  # fmt: skip
    transfer = min(_transfer_secs(torch, state))
    record.samples["torch/state_bytes"] = [float(sum(x.nbytes for x in state.values()))]
    record.samples["torch/transfer_secs"] = [transfer]
    saved()
    for n in range(1 + _SAVES):
        stall, visible = _save_secs(dcp, state, path)
        shutil.rmtree(path)  # the next one has the room
        name = "stall_in_transfers" if n else "first_stall_in_transfers"
        record.samples.setdefault(f"torch/{name}", []).append(stall / transfer)
        record.samples.setdefault("torch/visible_secs", []).append(visible)
        saved()
        if is_over():
            return


def _transfer_secs(torch: Any, state: dict[str, Any]) -> list[float]:
    """Of all tensors into memory of the host, warm."""
    on_gpu = next(iter(state.values())).is_cuda
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    hosts = [torch.empty_like(x, device="cpu", pin_memory=on_gpu) for x in state.values()]
    secs = []
    for _ in range(4):
        wait()
        start = time.perf_counter()
        for host, x in zip(hosts, state.values(), strict=True):
            host.copy_(x, non_blocking=True)
        wait()
        secs.append(time.perf_counter() - start)
    return secs[1:]


def _save_secs(dcp: Any, state: dict[str, Any], path: Path) -> tuple[float, float]:
    """Until the call returned, and until the checkpoint was there."""
    start = time.perf_counter()
    saving = dcp.async_save({"state": state}, checkpoint_id=path)
    returned = time.perf_counter()
    getattr(saving, "upload_completion", saving).result()
    return returned - start, time.perf_counter() - start


def _name(torch: Any, device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "the CPU"
