"""Set before JAX is imported: eight CPU devices that stand in for accelerators without FMA."""

import os

import pytest

# `--xla_cpu_max_isa=AVX` leaves the CPU without fused multiply-add, as accelerators are in
# elementwise code (docs/guarantees.md). The GPU tests run on their own and keep the platform's own.
_FLAGS = "--xla_force_host_platform_device_count=8 --xla_cpu_max_isa=AVX"
if os.environ.get("GOCKPT_TEST_PLATFORM", "cpu") == "cpu":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}".strip()


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in this hook too
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps the tests of one training program on one worker, so that it is compiled once."""
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if "name" in params and "devices" in params:
            item.add_marker(pytest.mark.xdist_group(f"{params['name']}-{params['devices']}"))
