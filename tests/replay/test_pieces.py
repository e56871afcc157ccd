"""Replay in pieces: the same bits whatever the piece, the fusion and the threads."""

from __future__ import annotations

import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from replay_helpers import moments, numbers, recipe_of, replayed, shard_of

from gockpt_jax.compiling import Programs
from gockpt_jax.replay import engine, programs
from gockpt_jax.replay.engine import Replayer
from gockpt_jax.replay.memory import Scratch, own
from gockpt_jax.replay.programs import (
    FUSED_UPDATES,
    PIECE_SIZES,
    TILE_SIZE,
    ReplaySpec,
    cut_up,
    fused,
)
from gockpt_jax.replay.shards import ShardReplay, Update

SIZES = [0, 1, 7, 509, 512, 513, 1024, 4096, 8191, 8192 + 5000, 65537, PIECE_SIZES[0] + 77_777]
LARGE = 2 * PIECE_SIZES[1] + 1024 + 5  # two pieces of several tiles, a smaller one, and a tail


@pytest.fixture(scope="module")
def recipe():
    return recipe_of(moments, (jnp.zeros(8), jnp.zeros(8)), jnp.zeros(8))


def narrow(state, g):
    """A bf16 moment beside an fp32 one, and a leaf that is only read."""
    m, total, mask = state
    total = jnp.where(mask > 0, total + 0.25 * g, total)
    return (m.astype(jnp.float32) * 0.9 + 0.1 * g).astype(jnp.bfloat16), total, mask


def factors(state, g):
    """Nothing but factors for the first: two updates in a row invite the compiler to fold them."""
    decayed, seen = state
    return decayed * 0.9, seen + decayed + g


def state_of(update, size):
    if update is narrow:
        mask = (numbers(5, size) > 0).astype(np.float32)
        return [numbers(3, size).astype(jnp.bfloat16), numbers(4, size), mask]
    return [numbers(0, size), np.abs(numbers(1, size))]


def one_by_one(update, state, gradients):
    """The step's own way: whole arrays, one update per program."""
    step, state = jax.jit(update), [jnp.asarray(x) for x in state]
    for g in gradients:
        state = step(state, g)
    return state


def assert_same_bits(got, want):
    for a, b in zip(got, want, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(np.array(a).view(np.uint8), np.array(b).view(np.uint8))


@pytest.mark.parametrize("size", SIZES)
def test_a_shard_is_cut_up_once_and_whole(size):
    pieces = list(cut_up(size))
    assert [i for part, _ in pieces for i in range(size)[part]] == list(range(size))
    assert {program for _, program in pieces} <= set(PIECE_SIZES)
    assert not any(program % TILE_SIZE for _, program in pieces if program > TILE_SIZE)
    for part, program in pieces[:-1]:
        assert part.stop - part.start == program
    assert all(program <= 2 * size or program == PIECE_SIZES[-1] for _, program in pieces)


@pytest.mark.parametrize("size", PIECE_SIZES)
def test_what_a_program_fits_is_not_cut_up(size):
    """As a rule: dimensions are powers of two."""
    assert list(cut_up(size)) == [(slice(0, size), size)]


@pytest.mark.parametrize("size", [s for s in PIECE_SIZES if s <= 32 * 1024])
def test_what_is_left_is_padded_where_it_is_half_a_program_or_more(size):
    """In one small piece, which costs less than many: a start each."""
    assert list(cut_up(size // 2)) == [(slice(0, size // 2), size)]
    assert len(list(cut_up(PIECE_SIZES[0] + size - 1))) == 2
    if size > PIECE_SIZES[-1]:
        assert next(cut_up(size // 2 - 1))[1] < size


def test_the_largest_pieces_are_never_padded():
    """Copies of them would need fresh memory."""
    assert max(size for _, size in cut_up(PIECE_SIZES[0] - 1)) < PIECE_SIZES[0]


@pytest.mark.parametrize("updates", range(10))
def test_updates_are_fused_into_few_numbers(updates):
    assert sum(fused(updates)) == updates
    assert set(fused(updates)) <= set(FUSED_UPDATES)


ASKING = {
    "unlike zero": lambda x: x != 0,
    "like zero": lambda x: x == 0,
    "as a flag": lambda x: x.astype(bool),
    "by its sign": lambda x: jnp.sign(x) == 0,
    "no further than zero": lambda x: jnp.abs(x) <= 0,
    "as large as below zero": lambda x: jnp.maximum(x, -x) <= 0,
}


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("name", ASKING)
def test_a_denormal_is_zero_to_each_of_several_updates(name, platform):
    """As to the step: LLVM asks the bits of a number whether it is zero, where it sees such."""

    def update(state, g):
        return (jnp.where(ASKING[name](state[0]), g, -g),)

    special = np.float32([0.0, -0.0, 1e-45, -1e-45, 5e-39, 1.2e-38, 1.0, -2.0, np.nan])
    state, *gradients = (np.resize(np.roll(special, n), SIZES[6]) for n in range(5))
    recipe = recipe_of(update, (jnp.asarray(state),), jnp.asarray(gradients[0]))
    shard = shard_of(recipe, [state], gradients)
    assert shard.spec.fused_updates == (1,)  # of more, compilers that take little time show nothing
    Replayer(platform).apply([shard])
    got = shard.states
    for a, b in zip(got, one_by_one(update, [state], gradients), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(np.signbit(a), np.signbit(b))


def test_updates_that_ask_for_numbers_that_are_none_are_fused():
    """As those that leave NaN out do: what is no number has no other bits."""
    update = lambda state, g: (jnp.where(jnp.isnan(state[0]), g, state[0]),)  # noqa: E731
    recipe = recipe_of(update, (jnp.zeros(8),), jnp.zeros(8))
    shard = shard_of(recipe, [numbers(0)], [numbers(n) for n in range(4)])
    assert shard.spec.fused_updates == FUSED_UPDATES


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_pieces_are_the_whole_bit_for_bit(recipe, platform, size):
    state, gradients = state_of(moments, size), [numbers(n + 2, size) for n in range(3)]
    got = replayed(Replayer(platform, threads=2), recipe, state, gradients)
    assert_same_bits(got, one_by_one(moments, state, gradients))


@pytest.mark.parametrize("update", [moments, narrow, factors])
@pytest.mark.parametrize("updates", [2, 4, 7])
def test_fused_is_single_bit_for_bit(update, updates):
    state = state_of(update, LARGE)
    gradients = [numbers(n + 10, LARGE) for n in range(updates)]
    recipe, replayer = recipe_of(update, state, gradients[0]), Replayer("gpu", threads=2)
    single = shard_of(recipe, state, gradients)
    for g in gradients:
        single = shard_of(recipe, single.states, [g])
        replayer.apply([single])
    assert_same_bits(replayed(replayer, recipe, state, gradients), single.states)
    assert_same_bits(single.states, one_by_one(update, state, gradients))


def test_shape_0d_is_a_shard_of_one(recipe):
    shard = shard_of(recipe, [np.float32([1]), np.float32([2])], [np.float32([3])])
    Replayer("cpu").apply([shard])
    want = one_by_one(moments, [np.float32(1), np.float32(2)], [np.float32(3)])
    assert [float(x[0]) for x in shard.states] == [float(x) for x in want]


def test_what_is_only_read_is_not_written():
    state = state_of(narrow, LARGE)
    recipe = recipe_of(narrow, state, numbers(0, LARGE))
    shard = shard_of(recipe, state, [numbers(0, LARGE)])
    shard.states[2].flags.writeable = False
    Replayer("gpu", threads=2).apply([shard])
    assert shard.recipe.changed == (0, 1)


def test_threads_share_the_pieces_and_change_nothing(recipe):
    state, g = state_of(moments, LARGE), [numbers(9, LARGE)]
    shards = [shard_of(recipe, state, g) for _ in range(8)]
    before = threading.active_count()
    Replayer("gpu", threads=4).apply(shards)
    assert threading.active_count() == before
    for shard in shards:
        assert_same_bits(shard.states, one_by_one(moments, state, g))


def test_groups_of_other_dtypes_are_replayed_together():
    """Each has its results in memory of its own."""
    size, shards, want = 2048, [], []
    for update in (moments, narrow, factors):
        state, g = state_of(update, size), [numbers(9, size)]
        shards.append(shard_of(recipe_of(update, state, g[0]), state, g))
        want.append(one_by_one(update, state, g))
    replayer = Replayer("cpu")
    assert replayer.scratch_bytes(shards) == 1024 * ((4 + 4) + (2 + 4))
    replayer.apply(shards)
    for shard, states in zip(shards, want, strict=True):
        assert_same_bits(shard.states, states)


def test_all_threads_have_ended_when_it_is_done(recipe, monkeypatch):
    """What the others have not copied back yet would be missing from the checkpoint."""
    ended = []

    class Noting(threading.Thread):
        def join(self, timeout=None):
            super().join(timeout)
            ended.append(self.name)

    monkeypatch.setattr(engine.threading, "Thread", Noting)
    state, g = state_of(moments, 1024), [numbers(9, 1024)]
    Replayer("gpu", threads=4).apply([shard_of(recipe, state, g) for _ in range(8)])
    assert ended == ["gockpt-replay"]


def test_one_thread_does_it_all_where_no_other_can_be_had(recipe, monkeypatch):
    """As while the interpreter ends."""

    class Refused(threading.Thread):
        def start(self):
            raise RuntimeError("can't create new thread at interpreter shutdown")

    state, g, replayer = state_of(moments, 1024), [numbers(9, 1024)], Replayer("gpu", threads=4)
    shards = [shard_of(recipe, state, g) for _ in range(8)]
    replayer.apply([shard_of(recipe, state, g)])  # compiled, on another thread
    with monkeypatch.context() as patch:
        patch.setattr(engine.threading, "Thread", Refused)
        replayer.apply(shards)
    for shard in shards:
        assert_same_bits(shard.states, one_by_one(moments, state, g))


@pytest.mark.parametrize("threads", range(1, 10))
def test_as_many_pieces_run_at_once_as_there_are_threads(threads):
    shares = engine._shares(threads)
    assert sum(shares) == threads
    assert max(shares) <= 2  # one runs while another is copied back


def test_an_error_leaves_no_program_running(recipe, monkeypatch):
    """What runs reads the shard, which the caller may drop. One runs while another is copied."""
    started, waited, ahead = [], [], []
    block_until_ready, compiled = jax.block_until_ready, programs.ReplayProgram.compiled

    def program(wanted):
        run = compiled(wanted)

        def once(*operands):
            if len(started) == 3:
                raise MemoryError("at the fourth")
            started.append(run(*operands))
            ahead.append(len(started) - len(waited))
            return started[-1]

        return once

    monkeypatch.setattr(programs.ReplayProgram, "compiled", program)
    monkeypatch.setattr(
        jax, "block_until_ready", lambda x: waited.append(x) or block_until_ready(x)
    )
    shard = shard_of(recipe, state_of(moments, 1024), [numbers(2, 1024)])
    with pytest.raises(MemoryError, match="at the fourth"):
        Replayer("gpu", threads=2).apply([shard] * 6)
    assert ahead == [1, 2, 2]
    assert [id(x) for x in started] == [id(x) for x in waited]


# Compilations.


@pytest.fixture
def compiled(monkeypatch):
    keys = []

    def compile_it(key):
        keys.append(key)
        return programs._compile(key)

    monkeypatch.setattr(programs, "_programs", Programs("gockpt-compile-replay", compile_it))
    return keys


def test_a_thousand_leaves_compile_a_handful(compiled):
    """Every leaf traced by itself: equal recipes are one, and sizes fall into a few."""
    sizes = np.random.default_rng(0).integers(1, 20_000, 1000)
    recipes = [recipe_of(moments, (jnp.zeros(n), jnp.zeros(n)), jnp.zeros(n)) for n in (5, 6)]
    shards = [
        shard_of(recipes[n % 2], [np.ones(s, np.float32)] * 2, [np.ones(s, np.float32)] * 3)
        for n, s in enumerate(sizes)
    ]
    Replayer("gpu", threads=2).apply(shards)
    assert 0 < len(compiled) <= len(PIECE_SIZES) * len(FUSED_UPDATES)
    (m,) = {x.tobytes() for shard in shards for x in shard.states[0].reshape(-1, 1)[:3]}
    assert m == np.float32(one_by_one(moments, [np.ones(1)] * 2, [np.ones(1)] * 3)[0]).tobytes()


@pytest.mark.parametrize("most", [2, 3])
def test_what_was_compiled_ahead_is_not_compiled_again(compiled, recipe, most):
    spec = shard_of(recipe, state_of(moments, LARGE), [numbers(2, LARGE)]).spec
    replayer = Replayer("gpu", threads=2)
    replayer.compile_ahead([(spec, LARGE)], max_updates=most)
    for thread in threading.enumerate():
        if thread.name == "gockpt-compile-replay":
            thread.join()
    ahead = len(compiled)
    assert ahead == len({size for _, size in cut_up(LARGE)}) * 2  # one update, and two
    replayed(replayer, recipe, state_of(moments, LARGE), [numbers(n, LARGE) for n in range(most)])
    assert len(compiled) == ahead


def test_a_compilation_that_failed_is_tried_again(compiled, recipe, monkeypatch):
    def failing(key):
        raise MemoryError("no room to compile")

    state, g = state_of(moments, 100), [numbers(2, 100)]
    with monkeypatch.context() as patch:
        patch.setattr(programs, "_compile", failing)
        with pytest.raises(MemoryError, match="no room"):
            replayed(Replayer("cpu"), recipe, state, g)
    assert_same_bits(replayed(Replayer("cpu"), recipe, state, g), one_by_one(moments, state, g))


# Memory.


def test_pulled_memory_is_written_where_it_lies():
    staged = jnp.arange(12.0).reshape(3, 4) + 0
    pulled = np.asarray(staged)
    flat = own(pulled)
    assert (flat.shape, flat.ctypes.data) == ((12,), pulled.ctypes.data)
    del staged, pulled
    flat += 1
    np.testing.assert_array_equal(flat, np.arange(12.0) + 1)


@pytest.mark.parametrize("data", [np.zeros((0, 3)), np.array(5.0), np.arange(3)[::-1]])
def test_odd_memory_is_owned_too(data):
    data.flags.writeable = False
    flat = own(data)
    np.testing.assert_array_equal(flat, data.reshape(-1))
    assert flat.size == 0 or flat.flags.writeable


def test_results_at_one_address_are_seen_as_what_they_are():
    """Memory of a buffer that is free is soon that of another: of other elements, or of fewer."""
    memory, scratch = np.arange(8, dtype=np.float32), Scratch()
    for like in (memory, memory.view(np.int32), memory[:4], memory.view(np.int16)[:8]) * 2:
        result = types.SimpleNamespace(
            unsafe_buffer_pointer=lambda: memory.ctypes.data,
            size=like.size, nbytes=like.nbytes, dtype=like.dtype,
        )  # fmt: skip
        seen = scratch.view(result)
        assert seen.dtype == like.dtype
        np.testing.assert_array_equal(seen, like)
        assert scratch.view(result) is seen


def test_scratch_is_a_small_part_of_a_large_shard(recipe):
    size = 50_000_000
    nothing = np.broadcast_to(np.float32(0), size)
    shard = ShardReplay(recipe, (nothing, nothing), (Update((nothing,), ()),))
    alone, together = (Replayer("gpu", n).scratch_bytes([shard]) for n in (1, 3))
    assert PIECE_SIZES[0] * 2 * 4 <= alone < 0.02 * 2 * 4 * size
    assert together == 3 * alone
    assert ReplaySpec is type(shard.spec)


# Faults: what the tests above look at would show them.


def _swapped(updates, states):
    chunk = PIECE_SIZES[1]
    states[0][: 2 * chunk] = np.roll(states[0][: 2 * chunk], chunk)
    return updates


FAULTS = {
    "chunks_swapped": _swapped,
    "gradient_dropped": lambda updates, states: updates[1:],
    "gradient_twice": lambda updates, states: (*updates, updates[-1]),
    "gradients_swapped": lambda updates, states: updates[::-1],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(recipe, fault):
    state, gradients = state_of(moments, LARGE), [numbers(n + 2, LARGE) for n in range(4)]
    shard = shard_of(recipe, state, gradients)
    wrong = FAULTS[fault](shard.updates, shard.states)
    Replayer("gpu", threads=2).apply([ShardReplay(recipe, shard.states, tuple(wrong))])
    with pytest.raises(AssertionError):
        assert_same_bits(shard.states, one_by_one(moments, state, gradients))
