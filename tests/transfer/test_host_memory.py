"""Host memory: the container's limit, in both kinds of control groups."""

from __future__ import annotations

import types

import pytest

from gockpt_jax.transfer.host_memory import (
    PINNED_LIMIT,
    PinnedPool,
    host_headroom_bytes,
    is_in_memory,
    pinned_pool,
)

GIB = 2**30


@pytest.fixture
def system(tmp_path):
    """Writes files of a small `/proc` and `/sys`; returns their root."""

    told = f"MemTotal: {96 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {64 * 2**20} kB\n"

    def write(files):
        for name, text in ({"proc/meminfo": told} | files).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(text))
        return tmp_path

    return write


def v2(group, limit, used, idle=0):
    base = f"sys/fs/cgroup{group}"
    return {
        f"{base}/memory.max": limit,
        f"{base}/memory.current": used,
        f"{base}/memory.stat": f"anon 1\ninactive_file {idle}\n",
    }


def test_without_a_limit_it_is_what_the_kernel_says(system):
    root = system({"proc/self/cgroup": "0::/\n"} | v2("", "max", 5 * GIB))
    assert host_headroom_bytes(root) == 64 * GIB


@pytest.mark.parametrize("group", ["/job", "/pod.slice:containerd:job"])
def test_the_limit_of_a_group_of_version_2(system, group):
    root = system({"proc/self/cgroup": f"0::{group}\n"} | v2(group, 20 * GIB, 9 * GIB, 4 * GIB))
    assert host_headroom_bytes(root) == 15 * GIB


def test_a_group_that_does_not_tell_what_is_taken(system):
    files = v2("/job", 20 * GIB, 9 * GIB)
    del files["sys/fs/cgroup/job/memory.current"]
    assert host_headroom_bytes(system({"proc/self/cgroup": "0::/job\n"} | files)) == 64 * GIB


def test_a_group_above_may_leave_less(system):
    groups = v2("/pod", 12 * GIB, 9 * GIB) | v2("/pod/job", 20 * GIB, 2 * GIB)
    assert host_headroom_bytes(system({"proc/self/cgroup": "0::/pod/job\n"} | groups)) == 3 * GIB


def test_in_a_container_only_the_top_is_there(system):
    groups = {"proc/self/cgroup": "0::/kubepods/pod7/job\n"} | v2("", 10 * GIB, 4 * GIB)
    assert host_headroom_bytes(system(groups)) == 6 * GIB


@pytest.mark.parametrize("controllers", ["memory", "cpuset,memory"])
def test_the_limit_of_a_group_of_version_1(system, controllers):
    """That of other controllers has nothing to say, even where a group of memory has its name."""

    def v1(group, limit):
        base = f"sys/fs/cgroup/memory/{group}"
        return {
            f"{base}/memory.limit_in_bytes": limit,
            f"{base}/memory.usage_in_bytes": 7 * GIB,
            f"{base}/memory.stat": f"cache 1\ntotal_inactive_file {GIB}\n",
        }

    of_process = f"5:cpu,cpuacct:/lean\n3:{controllers}:/job\n1:name=systemd:/lean\n"
    files = {"proc/self/cgroup": of_process} | v1("job", 8 * GIB) | v1("lean", 7 * GIB)
    assert host_headroom_bytes(system(files)) == 2 * GIB


def test_over_the_limit_there_is_nothing_left(system):
    root = system({"proc/self/cgroup": "0::/job\n"} | v2("/job", GIB, 2 * GIB))
    assert host_headroom_bytes(root) == 0


def test_a_system_that_tells_nothing(tmp_path):
    assert host_headroom_bytes(tmp_path) is None
    for name in ("proc/meminfo", "proc/self/cgroup"):
        (tmp_path / name).mkdir(parents=True)  # may not be read
    assert host_headroom_bytes(tmp_path) is None
    assert not is_in_memory("/anything", tmp_path)


def test_this_machine_tells_something():
    assert host_headroom_bytes() > 0


AT_ONCE = {"XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE": "True"}


@pytest.mark.parametrize(
    ("environ", "gib"),
    [
        ({}, 64),
        ({PINNED_LIMIT: "180"}, 180),
        (AT_ONCE, 16),
        (AT_ONCE | {PINNED_LIMIT: "100"}, 100),
        ({"XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE": "0"}, 64),
        ({PINNED_LIMIT: "lots"}, 64),  # XLA logs an error, and goes on so
    ],
)
def test_each_gpu_has_a_pool_of_pinned_memory(environ, gib):
    devices = [types.SimpleNamespace(platform=name) for name in ("gpu", "cpu", "cuda", "rocm")]
    pool = pinned_pool(devices, environ)
    assert pool == PinnedPool(devices=3, gib=gib)
    assert pool.limit_bytes == 3 * gib * GIB


def test_others_have_none():
    assert pinned_pool([types.SimpleNamespace(platform="tpu")], {}) is None
    assert pinned_pool([], {}) is None


@pytest.mark.parametrize(("num_bytes", "gib"), [(0, 0), (1, 1), (20 * GIB, 11), (20 * GIB + 1, 12)])
def test_what_a_pool_would_have_to_take_is_told_in_whole_gib(num_bytes, gib):
    assert PinnedPool(devices=2, gib=64).gib_for(num_bytes) == gib
