"""PyTorch's asynchronous distributed checkpoint on the same device, beside its own transfer."""

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.record import MEMORY, MEMORY_VARIABLE, Record

_TENSOR_BYTES = 2**28
_SAVES = 5

NOTES = [
    "torch/stall_in_transfers: seconds until `torch.distributed.checkpoint.async_save` returned, "
    "over those of copying the same tensors into memory that was there already, pinned on a GPU. "
    "The first save, which allocates, is torch/first_stall_in_transfers. torch/visible_secs: from "
    "the call until the checkpoint was there. Nothing trains meanwhile, and the process group has "
    "one member; checkpoints go to memory, where there is room.",
    "torch/pinned/...: the same in its strongest setting: a `DefaultStager` whose pinned memory is "
    "kept, and a thread and stream of its own. torch/pinned/staged_in_transfers: until the state "
    "was copied: so long the next optimizer step has to wait; forward and backward need not.",
]
Stall = tuple[float, float, float]
"""Seconds from the call until it returned, the state was copied, and the checkpoint was there."""


def run(
    record: Record, *, state_bytes: int, directory: Path | None,
    is_over: Callable[[], bool] = lambda: False, saved: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Measures it.

    Args:
      record: Takes figures.
      state_bytes: Of the tensors; fp32.
      directory: For its checkpoints; memory, or else the temporary directory, if `None`.
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
    with tempfile.TemporaryDirectory(dir=directory or _memory(3 * state_bytes)) as scratch:
        # One member has nothing to say to others: no NCCL, and no name of this machine to look up.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", init_method=f"file://{scratch}/group", rank=0, world_size=1)
        try:
            _measure(record, torch, dcp, state, Path(scratch, "checkpoint"), is_over, saved)
        finally:
            dist.destroy_process_group()


def _measure(
    record: Record, torch: Any, dcp: Any, state: dict[str, Any], path: Path,
    is_over: Callable[[], bool], saved: Callable[[], None],
) -> None:  # fmt: skip
    transfers = _transfer_secs(torch, state)
    transfer = statistics.median(transfers)
    record.samples["torch/state_bytes"] = [float(sum(x.nbytes for x in state.values()))]
    record.samples["torch/transfer_secs"] = transfers
    saved()
    stagers = {"": None, **_pinned_stager(record, torch)}
    for n in range(1 + _SAVES):
        for prefix, stager in list(stagers.items()):
            try:
                returned, staged, visible = _save_secs(dcp, state, path, stager)
            except Exception as error:
                if stager is None:
                    raise
                record.notes.append(f"torch/{prefix}: failed, {error!r}"[:500])
                stagers.pop(prefix).close()
                continue
            finally:
                shutil.rmtree(path, ignore_errors=True)  # the next one has the room
            found = {"stall_in_transfers": returned / transfer}
            if stager is not None:
                found["staged_in_transfers"] = staged / transfer
            for name, value in found.items():
                record.add(f"torch/{prefix}{'' if n else 'first_'}{name}", value)
            record.add(f"torch/{prefix}visible_secs", visible)
            saved()
        if is_over():
            break
    for stager in stagers.values():
        if stager is not None:
            stager.close()


def _pinned_stager(record: Record, torch: Any) -> dict[str, Any]:
    """Torch's own way that it does not take by itself; none without a GPU, or in an old one."""
    if not torch.cuda.is_available():
        return {}
    try:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        return {"pinned/": DefaultStager(StagingOptions(use_shared_memory=False))}
    except Exception as error:  # one figure less
        record.notes.append(f"torch/pinned: not measured, {error!r}.")
        return {}


def _transfer_secs(torch: Any, state: dict[str, Any]) -> list[float]:
    """Of all tensors into memory of the host, warm."""
    on_gpu = next(iter(state.values())).is_cuda
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    hosts = [torch.empty_like(x, device="cpu", pin_memory=on_gpu) for x in state.values()]
    secs = []
    for _ in range(1 + _SAVES):
        wait()
        start = time.perf_counter()
        for host, x in zip(hosts, state.values(), strict=True):
            host.copy_(x, non_blocking=True)
        wait()
        secs.append(time.perf_counter() - start)
    return secs[1:]  # the first warms up


def _save_secs(dcp: Any, state: dict[str, Any], path: Path, stager: Any) -> Stall:
    start = time.perf_counter()
    own = {} if stager is None else {"async_stager": stager}
    saving = dcp.async_save({"state": state}, checkpoint_id=path, **own)
    returned = time.perf_counter()
    if (staging := getattr(saving, "staging_completion", None)) is not None:
        staging.result()
    staged = time.perf_counter()
    getattr(saving, "upload_completion", saving).result()
    return returned - start, staged - start, time.perf_counter() - start


def _memory(num_bytes: int) -> Path | None:
    """Where a checkpoint takes no time that the stall is not about, if there is room."""
    path = Path(os.environ.get(MEMORY_VARIABLE, MEMORY))
    room = path.is_dir() and os.access(path, os.W_OK) and shutil.disk_usage(path).free
    return path if room > num_bytes else None


def _name(torch: Any, device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "the CPU"
