"""One part of `bench gpu`, in a process of its own: `python -m bench.gpu.part PART --out FILE`."""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.device import use_device_memory
from bench.record import Record, without_paths

_BESIDE = "overlap,donated"
"""The questions that depend on how the runtime dispatches; asked both ways."""
_LATE_SECS = 8.0  # for what has begun before the end of the time


def _transfer(record: Record, arguments: argparse.Namespace, left: Callable[[], float]) -> None:
    """What the machine is, and the questions to its link."""
    if arguments.questions:  # the process beside
        _ask(record, arguments, left())
        return
    use_device_memory(0.5)  # a process beside this one needs some
    _environment(record, arguments)
    record.write(arguments.out)
    _ask(record, arguments, left() - min(30.0, left() / 3))
    record.details["memory_stats_after"] = _memory_stats()
    record.write(arguments.out)
    _ask_with_async_dispatch(record, arguments, left())


def _ask(record: Record, arguments: argparse.Namespace, limit_secs: float) -> None:
    try:
        from bench.transfer.gpu import answer
    except ImportError as error:
        record.notes.append(f"the link: not measured, {without_paths(str(error))}.")
        return
    questions = arguments.questions.split(",") if arguments.questions else None
    answer(
        record, quick=arguments.toy, limit_secs=limit_secs, questions=questions,
        saved=lambda: record.write(arguments.out),
    )  # fmt: skip


def _ask_with_async_dispatch(
    record: Record, arguments: argparse.Namespace, limit_secs: float
) -> None:
    """Asks some questions of a process whose runtime dispatches on threads of its own."""
    environment = os.environ | {"PJRT_GPU_ENABLE_ASYNC_DISPATCH": "1"}
    use_device_memory(0.3, environment)
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "beside.json")
        words = [sys.executable, "-m", "bench.gpu.part", "transfer", "--questions", _BESIDE,
                 "--out", str(file), "--minutes", f"{limit_secs / 120:.3f}",
                 *(["--toy"] if arguments.toy else [])]  # fmt: skip
        try:
            subprocess.run(words, env=environment, timeout=max(1.0, limit_secs), check=True)
        except (subprocess.SubprocessError, OSError) as error:
            record.notes.append(f"async_dispatch: {type(error).__name__}, see the log.")
        found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    record.samples |= {f"async_dispatch/{k}": v for k, v in found.get("samples", {}).items()}
    record.notes += [f"async_dispatch/: {note}" for note in found.get("notes", ())]


def _environment(record: Record, arguments: argparse.Namespace) -> None:
    import jax

    from bench.train.place import places

    found: dict[str, Any] = {
        "devices": [str(device) for device in jax.devices()],
        "memory_kinds": [m.kind for m in jax.local_devices()[0].addressable_memories()],
        "memory_stats": _memory_stats(),
        "meminfo": Path("/proc/meminfo").read_text(encoding="ascii").splitlines()[:5],
        "flags": {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("XLA_", "JAX_")) and not value.startswith("/")
        },
    }
    query = "--query-gpu=name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max"
    if shutil.which("nvidia-smi"):
        answer = subprocess.run(
            ["nvidia-smi", query, "--format=csv"], capture_output=True, text=True, check=False
        )
        found["nvidia_smi"] = answer.stdout.splitlines()
    for place in places(arguments.directory, probe_bytes=2**24 if arguments.toy else 2**30):
        kind = "memory" if place.in_memory else "disk"
        record.samples[f"write_gbps/{kind}"] = [place.bytes_per_sec / 1e9]
        record.samples[f"free_gb/{kind}"] = [place.free_bytes / 1e9]
    record.details["environment"] = found


def _memory_stats() -> dict[str, int]:
    import jax

    return dict(jax.local_devices()[0].memory_stats() or {})


def _exact(record: Record, arguments: argparse.Namespace, left: Callable[[], float]) -> None:
    """How near replay on the host is to this device."""
    from bench.gpu import exact

    if arguments.shares > 1 and not arguments.share:
        _exact_in_shares(record, arguments, left)
        return
    share = tuple(map(int, arguments.share.split("/"))) if arguments.share else (0, 1)
    exact.run(
        record, toy=arguments.toy, is_over=lambda: left() < 0, share=share,
        saved=lambda: record.write(arguments.out),
    )  # fmt: skip


def _exact_in_shares(
    record: Record, arguments: argparse.Namespace, left: Callable[[], float]
) -> None:
    """The optimizers shared out to processes: most of the time is their compilers'."""
    from bench.gpu import exact

    count = arguments.shares
    environment = dict(os.environ)
    use_device_memory(0.5 / count, environment)
    use_device_memory(0.05)  # of this process, which only asks what the hardware is
    words = [sys.executable, "-m", "bench.gpu.part", "exact", *(["--toy"] if arguments.toy else [])]
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as started:
        files = [Path(scratch, f"{n}.json") for n in range(count)]
        children = []
        for n, file in enumerate(files):
            more = ["--share", f"{n}/{count}", "--out", str(file)]
            more += ["--minutes", f"{left() / 60:.3f}"]
            children.append(started.enter_context(subprocess.Popen(words + more, env=environment)))
            started.callback(children[-1].kill)
        running = True
        while running:
            running = any(child.poll() is None for child in children) and left() > -_LATE_SECS
            time.sleep(1.0 if running else 0.0)
            done = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
            exact.gather(record, done, exact.names_of(count, toy=arguments.toy))
            record.write(arguments.out)
        codes = [child.poll() for child in children]  # of those that are still at work, `None`
    ended, failed = codes.count(None), sum(map(bool, codes))
    if ended:
        record.notes.append(f"{ended} of {count} processes were ended with the time.")
    if failed:
        record.notes.append(f"{failed} of {count} processes failed, see the log.")


def _torch(record: Record, arguments: argparse.Namespace, left: Callable[[], float]) -> None:
    """PyTorch's own asynchronous checkpoint."""
    # The record asks JAX for the hardware: it must not take the memory that PyTorch has.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    from bench.gpu import torch_dcp

    torch_dcp.run(
        record, state_bytes=2**20 if arguments.toy else 2**32, directory=arguments.directory,
        is_over=lambda: left() < 0, saved=lambda: record.write(arguments.out),
    )  # fmt: skip


PARTS = {"transfer": _transfer, "exact": _exact, "torch": _torch}


def main() -> None:
    """Runs the part; what it has measured is written also when it fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--questions", help="of the transfer; all if left out")
    parser.add_argument("--shares", type=int, default=1, help="processes that measure exactness")
    parser.add_argument("--share", help="which of them this is: number/count")
    arguments = parser.parse_args()
    end = time.perf_counter() + 60 * arguments.minutes
    record = Record(f"gpu {arguments.part}")
    try:
        PARTS[arguments.part](record, arguments, lambda: end - time.perf_counter())
    except Exception:
        record.details["failure"] = without_paths(traceback.format_exc())
        raise
    finally:
        record.write(arguments.out)


if __name__ == "__main__":
    main()
