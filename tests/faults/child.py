"""A training program for a process of its own, which others kill, starve or let end.

Prints one line per event, flushed, so that the parent can follow. Before it calls `save` it leaves
the hash of the state on disk: a killed process cannot be asked what it had given.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import resource
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import pytest


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--cache", required=True)
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--kill", default="", help="stage:n, the n-th call of a stage dies")
    parser.add_argument("--keep", type=int, help="max_to_keep")
    parser.add_argument("--remove", default="", help="dies when a file of this name is removed")
    parser.add_argument("--ending", default="", help="where:how, or 'full' for a full disk")
    options = parser.parse_args()
    jax.config.update("jax_compilation_cache_dir", options.cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if options.ending == "full":
        fill_disk(options.directory)
    elif options.ending:
        end(options.directory, *options.ending.split(":"))
    else:
        if options.kill:
            die_at(*options.kill.split(":"))
        if options.remove:
            die_removing(options.remove)
        train(options.directory, options.steps, max_to_keep=options.keep)


def say(*words: Any) -> None:
    """Tells the parent, at once."""
    print(*words, flush=True)


def note(path: pathlib.Path, text: str) -> None:
    """Writes a file that survives the process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


# --- Random kills --------------------------------------------------------------------------------


def train(directory: pathlib.Path, steps: int, **options: Any) -> None:
    """Trains to the end, from the newest checkpoint if there is one."""
    import gockpt_jax as gockpt

    from .states import bits_of, digest_of
    from .trainer import Trainer

    side = directory.with_name(directory.name + "_given")
    with Trainer(directory, **options) as trainer:
        latest = trainer.manager.latest_step()
        if latest is not None:
            trainer.state = trainer.manager.restore(
                latest, args=gockpt.GoCkptRestore(trainer.target)
            )
            trainer.label = latest + 1
        say("start", trainer.label)
        while trainer.label < steps:
            trainer.update()
            # Two processes give the same state under one label, or resuming is broken.
            note(side / f"{trainer.label - 1}", digest_of(bits_of(trainer.state)))
            trainer.save()
            say("step", trainer.label - 1, trainer.manager.window_status)
        trainer.manager.wait_until_finished()
        say("reports", [(report.step, report.kind) for report in trainer.manager.reports])
        note(side / "final", digest_of(bits_of(trainer.state)))


STAGES = {
    "stage": ("gockpt_jax.transfer.staging", "stage"),
    "pull": ("gockpt_jax.transfer.pull", "Pull.result"),
    "replay": ("gockpt_jax.replay.engine", "Replayer.apply"),
    "write": ("gockpt_jax.storage.writing.leaf_writer", "_check_data"),
    "metadata": ("gockpt_jax.storage.writing.tree_writer", "TreeWriter._write_array_metadatas"),
    "finalize": ("gockpt_jax.storage.saving.state_handler", "StateHandler.finalize"),
    "rename": ("os", "rename"),
    "unlink": ("shutil", "rmtree"),
}


def die_at(stage: str, nth: str) -> None:
    """Lets the n-th call of a stage kill this process."""
    import importlib

    from .injection import replace

    module_name, path = STAGES[stage]
    owner: Any = importlib.import_module(module_name)
    *classes, name = path.split(".")
    for part in classes:
        owner = getattr(owner, part)
    function, calls = getattr(owner, name), iter(range(int(nth)))

    def deadly(*args: Any, **kwargs: Any) -> Any:
        if next(calls, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    import gockpt_jax  # noqa: F401  All modules that hold the function by name.

    replace(pytest.MonkeyPatch(), owner, name, deadly)


def die_removing(name: str) -> None:
    """Lets the removal of a file of some name, such as old checkpoints have, kill this process."""
    unlink = os.unlink

    def deadly(path: Any, *args: Any, **kwargs: Any) -> None:
        unlink(path, *args, **kwargs)
        if os.path.basename(path) == name:
            os.kill(os.getpid(), signal.SIGKILL)

    os.unlink = deadly


# --- A full disk ---------------------------------------------------------------------------------


def fill_disk(directory: pathlib.Path) -> None:
    """Save 8 finds no room; the process reports what it saw and goes on."""
    from .states import digest_of
    from .trainer import Trainer

    with Trainer(directory) as trainer:
        trainer.run_undisturbed(7)
        trainer.update()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, limits[1]))
        failed = None
        try:
            trainer.save()
            trainer.manager.wait_until_finished()
        except Exception as error:
            failed = error
        finally:  # Before a word is said: what the parent reads is a file too.
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        if failed is not None:
            say("failed", type(failed).__name__, str(failed).replace("\n", " "))
        trainer.given.pop(8, None)
        say("steps", sorted(trainer.manager.all_steps()))
        say("error", trainer.report(8).error)
        trainer.run_past_next_window()
        trainer.assert_intact()
        for label, bits in trainer.given.items():
            say("given", label, digest_of(bits))


# --- Endings -------------------------------------------------------------------------------------


def end(directory: pathlib.Path, where: str, how: str) -> None:
    """Ends the process in some state of the window, in some way, without `close()`."""
    from .places import go_to
    from .states import digest_of
    from .trainer import Trainer

    trainer = Trainer(directory)
    release = go_to(trainer, where)
    for label, bits in trainer.given.items():
        say("given", label, digest_of(bits))
    say("status", trainer.manager.window_status)
    threading.Thread(target=_at_shutdown, args=(release,)).start()
    say("ending")
    if how == "exception":
        raise LookupError("the loop failed")
    if how == "exit":
        sys.exit(3)


def _at_shutdown(release: Callable[[], None]) -> None:
    """Lets go of what is held back only when the interpreter is on its way out."""
    from .places import wait_for_shutdown

    wait_for_shutdown()
    release()


if __name__ == "__main__":
    main()
