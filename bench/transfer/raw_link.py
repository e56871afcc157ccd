"""The raw link of an NVIDIA GPU: the driver's own copy into pinned memory, without JAX."""

import ctypes
import time
from typing import Any


def raw_link_secs(device_pointer: int, num_bytes: int, repeats: int) -> list[float]:
    """Copies device memory to pinned host memory, warm.

    Args:
      device_pointer: Of memory in the primary context of the device, which is where JAX keeps it.
      num_bytes: How much.
      repeats: Timed copies, after one that is not.

    Returns:
      Seconds of each.

    Raises:
      OSError: if there is no driver, or it refuses.
    """
    cuda = ctypes.CDLL("libcuda.so.1")
    _check(cuda.cuInit(0), "cuInit")
    source = ctypes.c_uint64(device_pointer)
    context, host = ctypes.c_void_p(), ctypes.c_void_p()
    device = ctypes.c_int()
    # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: the memory says where it is.
    _check(cuda.cuPointerGetAttribute(ctypes.byref(device), 9, source), "cuPointerGetAttribute")
    _check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
    try:
        _check(cuda.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent")
        try:
            size = ctypes.c_size_t(num_bytes)
            _check(cuda.cuMemHostAlloc(ctypes.byref(host), size, 0), "cuMemHostAlloc")
            try:
                return [_copy_secs(cuda, host, source, size) for _ in range(repeats + 1)][1:]
            finally:
                cuda.cuMemFreeHost(host)
        finally:
            cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    finally:
        cuda.cuDevicePrimaryCtxRelease_v2(device)


def _copy_secs(cuda: Any, host: Any, source: Any, size: Any) -> float:
    start = time.perf_counter()
    _check(cuda.cuMemcpyDtoH_v2(host, source, size), "cuMemcpyDtoH")
    return time.perf_counter() - start


def _check(status: int, call: str) -> None:
    if status != 0:
        raise OSError(f"{call} returned CUDA error {status}")
