"""A GPU's pool of pinned memory has a limit: what finds it full leaves some other way."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import SingleDeviceSharding
from window import training_loop

from gockpt_jax.transfer import pull

FULL = "RESOURCE_EXHAUSTED: Out of host memory."


class NeverCame:
    """What a version of JAX returns where another raises."""

    def is_ready(self):
        return True

    def __array__(self, *args, **kwargs):
        raise jax.errors.JaxRuntimeError(FULL)


@pytest.mark.parametrize("steps", [1, 4], ids=["snapshot", "window"])
@pytest.mark.parametrize("each", [1, 2], ids=["always", "now-and-then"])
@pytest.mark.parametrize("when", ["call", "result"])
def test_a_save_without_pinned_memory_is_whole(tmp_path, monkeypatch, caplog, steps, each, when):
    asked, put = [], jax.device_put

    def full(x, device=None, **kwargs):
        if isinstance(device, SingleDeviceSharding) and device.memory_kind == "pinned_host":
            asked.append(x)
            if len(asked) % each == 0:
                if when == "call":
                    raise jax.errors.JaxRuntimeError(FULL)
                return NeverCame()
        return put(x, device, **kwargs)

    monkeypatch.setattr(pull, "host_memory_kind", lambda device: "pinned_host")
    monkeypatch.setattr(jax, "device_put", full)
    pull._warn_of_a_full_pool.cache_clear()
    loop = training_loop.Loop(tmp_path, window={"steps": steps})
    loop.train(8)
    loop.manager.wait_until_finished()
    assert len(asked) >= each
    loop.assert_saved(0, 4, 8)
    report = loop.manager.last_report
    assert report.window_steps == steps
    assert steps == 1 or report.audit.max_ulps == 0
    loop.manager.close()
    assert caplog.text.count("there is no more pinned memory") == 1
