"""Programs compiled on a thread: once each, the needed ones first, and also while Python ends."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading

import pytest
from signals import Signals

from gockpt_jax import compiling
from gockpt_jax.compiling import Programs

WAIT_SECS = 60
_NUMBERS = itertools.count()


class Compiler:
    """Notes what it compiles, and holds up the first until it is let go."""

    def __init__(self):
        self.thread_name = f"compiler {next(_NUMBERS)}"
        self.programs = Programs(self.thread_name, self.make)
        self.made = []
        self.has_begun, self.go_on = threading.Event(), threading.Event()

    def make(self, name):
        self.made.append(name)
        self.has_begun.set()
        assert self.go_on.wait(WAIT_SECS)
        return name

    def want(self, *names):
        for name in names:
            self.programs.wanted(name)
        assert self.has_begun.wait(WAIT_SECS)

    def need(self, name):
        return self.programs.needed(name)

    def let_go_when_another_is_needed(self):
        has_come = self.go_on

        class Queue(dict):
            def __setitem__(self, key, value):
                super().__setitem__(key, value)
                has_come.set()

        self.programs._needed = Queue()


def test_what_is_needed_comes_before_what_is_wanted():
    compiler = Compiler()
    compiler.want("first", "second", "third")
    (thread,) = [t for t in threading.enumerate() if t.name == compiler.thread_name]
    assert not thread.daemon  # inside JAX it would abort the process as Python ends
    compiler.let_go_when_another_is_needed()
    assert compiler.need("third") == "third"
    assert [compiler.need(name) for name in ("first", "second")] == ["first", "second"]
    assert compiler.made == ["first", "third", "second"]


def test_while_no_thread_can_be_had_the_caller_compiles(monkeypatch):
    def refused(self):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    compiler = Compiler()
    compiler.go_on.set()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        assert compiler.need("first") == "first"
    assert compiler.need("second") == "second"


def test_a_thread_that_is_about_to_end_is_not_counted_on(monkeypatch):
    run, found_nothing, go_on = Programs._run, threading.Event(), threading.Event()

    def lingering(programs):
        run(programs)
        found_nothing.set()
        assert go_on.wait(WAIT_SECS)

    monkeypatch.setattr(Programs, "_run", lingering)
    programs = Programs("a test", int)
    assert programs.needed("6") == 6
    assert found_nothing.wait(WAIT_SECS)
    try:
        assert programs._ask(("7",), programs._needed).result(WAIT_SECS) == 7
    finally:
        go_on.set()


@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyboardInterrupt()])
def test_a_failure_reaches_whoever_needs_it_and_is_tried_again(error):
    errors = [error]

    def compile_it(number):
        if errors:
            raise errors[0]
        return number / 2

    programs = Programs("a test", compile_it)
    programs.wanted(6)
    with pytest.raises(type(error)):
        programs._ask((6,), programs._needed).result(WAIT_SECS)
    errors.clear()
    assert programs.needed(6) == 3


def test_whoever_is_told_of_a_failure_may_ask_again_at_once():
    """It was not to be handed the same one."""
    errors, go_on, again = [MemoryError()], threading.Event(), queue.SimpleQueue()

    def compile_it(name):
        assert go_on.wait(WAIT_SECS)
        if errors:
            raise errors.pop()
        return int(name)

    programs = Programs("a test", compile_it)
    first = programs._ask(("7",), programs._needed)
    first.add_done_callback(lambda _: again.put(programs._ask(("7",), programs._needed)))
    go_on.set()
    assert again.get(timeout=WAIT_SECS).result(WAIT_SECS) == 7


def test_what_has_been_compiled_needs_no_thread(monkeypatch):
    """It is asked for with every block and every replay."""
    compiler = Compiler()
    compiler.go_on.set()
    assert compiler.need("first") == "first"
    for thread in threading.enumerate():
        if thread.name == compiler.thread_name:
            thread.join(WAIT_SECS)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", None)
        assert compiler.need("first") == "first"


def test_nothing_is_compiled_ahead_once_the_main_thread_has_ended(monkeypatch):
    """A save that is being finished then still gets what it needs."""
    compiler = Compiler()
    compiler.want("first", "second", "third")
    monkeypatch.setattr(threading.main_thread(), "is_alive", lambda: False)
    compiler.let_go_when_another_is_needed()
    assert compiler.need("third") == "third"
    assert compiler.made == ["first", "third"]
    assert compiler.need("second") == "second"


def test_a_failure_once_the_main_thread_has_ended_reaches_whoever_needs_it(monkeypatch):
    """Though nobody knows of the program any more, which had been wanted before."""
    compiler = Compiler()
    compiler.want("first", "second")
    monkeypatch.setattr(threading.main_thread(), "is_alive", lambda: False)
    monkeypatch.setattr(compiler, "made", None)
    second = compiler.programs._ask(("second",), compiler.programs._needed)
    compiler.go_on.set()
    with pytest.raises(AttributeError):
        second.result(WAIT_SECS)


def test_as_many_are_kept_as_were_said_and_those_used_last():
    """A loop that saved other shapes each time kept all of their programs for the process."""
    made = []
    programs = Programs("a test", lambda name: made.append(name) or name, most=2)
    for name in ("first", "second", "first", "third", "first", "second"):
        assert programs.needed(name) == name
    assert made == ["first", "second", "third", "second"]


def test_what_is_still_to_be_compiled_is_not_forgotten():
    compiler = Compiler()
    compiler.programs._most = 2
    compiler.want("first", "second", "third", "fourth")
    compiler.let_go_when_another_is_needed()
    names = ["fourth", "second", "third", "fifth"]
    assert [compiler.need(name) for name in names] == names
    assert len(compiler.programs._found) == 2
    assert compiler.made == ["first", "fourth", "second", "third", "fifth"]


def test_a_thread_that_an_interrupt_kept_from_starting_is_not_waited_for(monkeypatch):
    """`Signals` leaves out the start of threads: Python does not survive one that comes later."""

    def interrupted(thread):
        raise KeyboardInterrupt

    programs = Programs("a test", int)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            programs.wanted("7")
    assert programs._ask(("7",), programs._needed).result(WAIT_SECS) == 7


@pytest.mark.parametrize("failures", [0, 1])
@pytest.mark.parametrize("before", ["", "wanted"])
@pytest.mark.parametrize("then", ["wanted", "needed"])
def test_whoever_is_interrupted_as_they_ask_may_ask_again(before, then, failures):
    """It was waited for ever: nobody had it in a queue, or the thread had not been started."""
    for place in itertools.count(1):
        errors = [MemoryError("no room to compile")] * failures

        def compile_it(name, errors=errors):
            if name == "7" and errors:
                raise errors.pop()
            return int(name)

        programs = Programs("a test", compile_it)
        signals = Signals([place], inside=(compiling.__file__,))
        if before:
            programs.wanted("7")
        with contextlib.suppress(KeyboardInterrupt), signals.coming():
            programs._ask(("7",), getattr(programs, f"_{then}"))
        assert programs._ask(("6",), programs._needed).result(WAIT_SECS) == 6
        try:
            found = programs._ask(("7",), programs._needed).result(WAIT_SECS)
        except MemoryError:  # of the one that asked before
            found = programs._ask(("7",), programs._needed).result(WAIT_SECS)
        assert found == 7
        if not signals.came_at:
            break
    assert place > 3
