"""Set before JAX is imported: eight CPU devices that stand in for accelerators without FMA.

No plugin of pytest is needed here: `pytest -m gpu` runs on machines that have pytest alone.
"""

import gc
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import hurry
import nursery
import pytest

# `--xla_cpu_max_isa=AVX` leaves the CPU without fused multiply-add, as accelerators are in
# elementwise code (docs/guarantees.md). The GPU tests run on their own and keep the platform's own.
_FLAGS = "--xla_force_host_platform_device_count=8 --xla_cpu_max_isa=AVX"
if hurry.IS_ASKED_FOR:
    _FLAGS = f"{_FLAGS} {hurry.FLAGS}"
_HAS_GPU = any(Path("/dev").glob("nvidia[0-9]*"))
_FOR_GPU = _HAS_GPU and "-m gpu" in " ".join(sys.argv)
_PLATFORM = os.environ.setdefault("GOCKPT_TEST_PLATFORM", "gpu" if _FOR_GPU else "cpu")
_ON_CPUS = _PLATFORM in ("cpu", "pretended")
if _ON_CPUS:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}".strip()
elif os.environ.get("JAX_PLATFORMS") in ("cuda", "gpu"):
    os.environ["JAX_PLATFORMS"] = "cuda,cpu"  # replay needs the CPU backend


# Tests of one training program, on one device or eight: `[adamw-8]`, `[3-adamw-8]`.
_OF_PROGRAM = re.compile(r"(?:invariants/|test_programs\.py).*\[(?:.+-)?([a-z]\w*)-([18])\]$")
# On eight devices too, and the first of them where no program is named.
_READ_BY_STOCK = re.compile(r".*/test_stock_readable\.py(?:.*\[(batch\w+|transformer\w+))?")
# Files whose tests share something dear, made once on each worker that runs any of them.
_SHARING = re.compile(
    r".*(?:bench|integrations|multiprocess|replay)/\w+\.py"
    r"|.*/test_(?:cli_checkpoints|fence|never_waits|restore|verify)\.py"
)
# The last to end should not have begun last; nor tests that leave a thread of Orbax's behind, which
# waits for 300 s for a directory that could not be made: the run ends when it does.
_FIRST = (
    "test_random_kills.py", "test_example.py", "test_nnx_example.py", "test_stock_readable.py",
    "test_storage_errors.py", "test_hand_over.py",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Knows the setting of a plugin that is not there: with `--strict-config` it is an error."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "of each test in seconds, with pytest-timeout")


def pytest_configure(config: pytest.Config) -> None:
    """What others deprecate on a borrowed machine, when imported too, is no fault of ours."""
    if not _ON_CPUS:
        config.addinivalue_line("filterwarnings", "default")
    if _PLATFORM == "pretended":
        _pretend_accelerators()


def _pretend_accelerators() -> None:
    """CPU devices are pulled from by way of pinned memory, in few buffers; replay fences products.

    Which is all that the library does otherwise on an accelerator, but for the number of threads.
    """
    from gockpt_jax.replay import engine
    from gockpt_jax.transfer import layout, pull

    begin = engine.Replayer.__init__

    def begin_fenced(replayer: engine.Replayer, platform: str, threads: int | None = None) -> None:
        del platform, threads  # more than one could wait for collectives: the devices are shared
        begin(replayer, "pretended", 1)

    pull.host_memory_kind = lambda device: "pinned_host"
    layout._FEW_ON["cpu"] = 2
    engine.Replayer.__init__ = begin_fenced  # type: ignore[method-assign]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m gpu` imports only what has such tests: the others need more packages."""
    wanted = Path(__file__).parent / "gpu"
    related = collection_path.is_relative_to(wanted) or wanted.is_relative_to(collection_path)
    return True if config.getoption("markexpr") == "gpu" and not related else None


def _scope(nodeid: str) -> str:
    """What a test shares with others that are to run on its worker."""
    if found := _OF_PROGRAM.search(nodeid):
        return f"{found.group(2)}-{found.group(1)}"
    if found := _READ_BY_STOCK.match(nodeid):
        return f"8-{found.group(1) or 'clip_adamw'}"
    if found := _SHARING.match(nodeid):
        return found.group()
    return nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object | None:
    """For `--dist loadgroup`, of which pytest-xdist 3.8 makes nothing under pytest 9."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling  # it is there: it has called

    class Together(LoadScopeScheduling):
        """Keeps tests that share something dear on one worker, so that it is made once."""

        def _split_scope(self, nodeid: str) -> str:
            return _scope(nodeid)

    return Together(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Those of `_FIRST` begin first, in their order; some are left to `make thorough`.

    What is asked for by its name is run.
    """
    items.sort(key=lambda item: item.path.name not in _FIRST)
    if not _ON_CPUS:
        _leave_out(config, items, _needs_a_mesh)
    if "GOCKPT_THOROUGH" in os.environ or any("::" in arg for arg in config.args):
        return
    seen: set[tuple[str, str, int]] = set()
    left: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        values = getattr(getattr(item, "callspec", None), "params", {}).items()
        new = {(item.nodeid.partition("[")[0], name, id(value)) for name, value in values} - seen
        is_more = item.get_closest_marker("sampled") is not None and bool(values) and not new
        is_left = is_more or item.get_closest_marker("thorough") is not None
        if not is_left:
            seen |= new
        left[is_left].append(item)
    config.hook.pytest_deselected(items=left[True])
    items[:] = left[False]


def _leave_out(
    config: pytest.Config, items: list[pytest.Item], is_left: Callable[[pytest.Item], bool]
) -> None:
    config.hook.pytest_deselected(items=[item for item in items if is_left(item)])
    items[:] = [item for item in items if not is_left(item)]


def _needs_a_mesh(item: pytest.Item) -> bool:
    """Whether a test is of several devices: a borrowed machine has one."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    return params.get("devices", 1) != 1 or params.get("placement", "single") != "single"


def pytest_collection_finish() -> None:
    """What has been imported and collected stays, so no garbage collection need look through it."""
    gc.freeze()


@pytest.fixture
def its_own_garbage() -> Iterator[None]:
    """For tests that collect it: through what others have left, each time is most of a second."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="session")
def _compile_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What one worker of this run has compiled, it does not compile again: half of all time was.

    Every manager lowers its armed step anew, and every `jax.jit` its function; JAX's persistent
    cache knows the same program by all that goes into its compilation. Each worker has its own, in
    a folder of this run: entries are not written at once, and another could read half of one.
    """
    import jax  # not sooner: the flags above come first

    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.getbasetemp() / "compiled"),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(autouse=True, scope="session")
def _nursery() -> Iterator[None]:
    """Ends with the run, if a test has started it."""
    yield
    nursery.close()


@pytest.fixture(scope="session", autouse=True)
def _nobody_deletes_what_is_verified() -> Iterator[None]:
    """`verify` waits for a second at each damaged step of a directory: it may be on its way out."""
    from gockpt_jax.storage.inspecting import verify_step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify_step, "_DELETING_SECS", 0.0)
        yield
