"""Files written past the page cache, and which layout is the default where."""

import concurrent.futures
import errno
import fcntl
import itertools
import os
import pathlib
import re
import threading
import tracemalloc
import weakref

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from etils import epath
from storage_helpers import host_tree, save

from gockpt_jax import GoCkptManager, GoCkptSave
from gockpt_jax.storage.files import aligned, checksums, direct, grid, item_files, syncs
from gockpt_jax.storage.files.aligned import is_past_cache
from gockpt_jax.storage.files.direct import DirectFiles
from gockpt_jax.storage.writing import tree_handler
from gockpt_jax.storage.writing.tree_handler import make_tree_handler

SIZES = [1, 511, 4096, 4097, 2**20, 4 * 2**20 + 1, 9 * 2**20 + 4096]


@pytest.fixture
def files(tmp_path):
    made = DirectFiles(str(tmp_path), 2**28)
    yield made
    made.close()


@pytest.mark.parametrize("has_direct_mode", [True, False])
@pytest.mark.parametrize("offset", [0, 64])
def test_files_hold_the_bytes(tmp_path, files, monkeypatch, has_direct_mode, offset):
    """Of any length, in aligned and other memory, on file systems with and without the mode."""
    if not has_direct_mode:
        monkeypatch.setattr(direct, "O_DIRECT", 0)
    rng = np.random.default_rng(0)
    base = rng.integers(0, 256, max(SIZES) + 8192, np.uint8)
    start = -base.ctypes.data % 4096 + offset
    written = [files.write(f"{tmp_path}/new/{n}", base[start : start + n]) for n in SIZES]
    for n, future in zip(SIZES, written, strict=True):
        assert future.result() == checksums.digest(base[start : start + n])
        found = pathlib.Path(f"{tmp_path}/new/{n}").read_bytes()
        assert found == base[start : start + n].tobytes(), n


def test_a_file_system_without_direct_mode(tmp_path, files, monkeypatch):
    refused = []

    def refuse(fd, command, flags=0):
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            refused.append(fd)
            raise OSError(errno.EINVAL, "no such mode")
        return control(fd, command, flags)

    control = fcntl.fcntl
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    values = np.arange(2**19, dtype=np.float32)
    files.write(f"{tmp_path}/x", values).result()
    assert refused
    assert (tmp_path / "x").read_bytes() == values.tobytes()


@pytest.mark.parametrize("refusal", [errno.EINVAL, errno.EFAULT])
def test_a_file_system_that_refuses_blocks(tmp_path, files, monkeypatch, refusal):
    """As one may where pages are larger, or the memory is a driver's; it has the mode."""
    write, refused = os.pwrite, []

    def refuse(fd, content, offset):
        if is_past_cache(fd):
            refused.append(offset)
            raise OSError(refusal, "not a multiple of 64 KiB")
        return write(fd, content, offset)

    monkeypatch.setattr(os, "pwrite", refuse)
    values = np.arange(9 * 2**20 + 5, dtype=np.uint8)
    path = f"{tmp_path}/x"
    files.share(path, 2 * values.nbytes, [0, values.nbytes])
    files.write(path, values).result()
    assert open_below(tmp_path) == [path]  # until it is synced, as all that has gone this way
    files.write(path, values, values.nbytes).result()
    files.sync()
    assert refused
    assert pathlib.Path(path).read_bytes() == 2 * values.tobytes()


@pytest.mark.parametrize("n", [9000, 9 * 2**20 + 5])
def test_the_system_may_take_a_part_of_what_it_is_given(tmp_path, files, monkeypatch, n):
    """A signal, or a disk that is nearly full: the rest comes behind it."""
    write, values = os.pwrite, np.random.default_rng(0).integers(0, 256, n, np.uint8)

    def write_a_part(fd, content, offset):
        return write(fd, content[: max(1, len(content) // 3 // 4096) * 4096], offset)

    monkeypatch.setattr(direct.os, "pwrite", write_a_part)
    files.write(f"{tmp_path}/x", values).result()
    assert (tmp_path / "x").read_bytes() == values.tobytes()


def test_values_are_in_c_order(tmp_path, files):
    values = np.arange(6 * 4 * 5).reshape(6, 4, 5).astype(ml_dtypes.bfloat16)
    for n, part in enumerate((values, values.T, values[1:5, ::2], values[:, 1:3, 2:])):
        files.write(f"{tmp_path}/{n}", part).result()
        assert (tmp_path / str(n)).read_bytes() == part.tobytes()


@pytest.mark.parametrize("rows", [1024, 1000, 1])  # of which 1000 float32 do not end with a block
def test_columns_of_a_shard(tmp_path, files, rows):
    """What a chunk is where a shard is cut along its last axis: no piece of it is contiguous."""
    shard = np.random.default_rng(0).random((2**22 // rows, 3, rows), np.float32)
    part = shard[:, 1:2]
    tracemalloc.start()
    digest = files.write(f"{tmp_path}/x", part).result()
    assert tracemalloc.get_traced_memory()[1] < 2**20  # no copy of the chunk beside the buffers
    tracemalloc.stop()
    content = part.tobytes()
    assert (tmp_path / "x").read_bytes() == content
    assert digest == checksums.digest(np.frombuffer(content, np.uint8))


def test_the_last_piece_of_columns_may_be_shorter_than_what_ends_within_a_block(tmp_path, files):
    """Pieces that do not end with a block: of bytes, 2,794 rows each, and one row in the last."""
    part = np.random.default_rng(0).integers(0, 256, (3 * 2794 + 1, 1502), np.uint8)[:, :1501]
    assert part.shape[1] < part.nbytes % 4096
    files.write(f"{tmp_path}/x", part).result()
    assert (tmp_path / "x").read_bytes() == part.tobytes()


@pytest.mark.parametrize("offset", [0, 100])
def test_nothing_is_handed_to_the_disk_that_it_must_refuse(tmp_path, files, monkeypatch, offset):
    """What follows would go through the page cache; so does what lies within a block, alone."""
    refused, write = [], os.pwrite

    def told(fd, content, start):
        try:
            return write(fd, content, start)
        except OSError as error:
            refused.append(error)
            raise

    monkeypatch.setattr(direct.os, "pwrite", told)
    columns = np.ones((1500, 3, 1000), np.float32)[:, 1:2]  # whose pieces do not end with a block
    for n, values in enumerate((np.ones(9 * 2**20 + 5, np.uint8), columns)):
        files.write(f"{tmp_path}/{n}", values, offset).result()
        assert (tmp_path / str(n)).read_bytes() == bytes(offset) + values.tobytes()
    assert refused == []


def test_only_what_the_disk_cannot_take_is_copied(tmp_path, files, monkeypatch):
    copied, take = [], files._buffers.take
    monkeypatch.setattr(files._buffers, "take", lambda: copied.append(1) or take())
    with open(tmp_path / "y", "wb") as file:
        alignment = aligned.memory_alignment(file.fileno())
    assert alignment in {2**n for n in range(13)}
    memory = aligned.aligned_empty(3 * 2**20)
    for offset, is_copied in ((0, 0), (alignment, 0), (alignment + alignment // 2 or 1, 1)):
        memory[:] = np.random.default_rng(offset).integers(0, 256, memory.size, np.uint8)
        values = memory[offset : offset + 2**20]
        files.write(f"{tmp_path}/x", values).result()
        assert (tmp_path / "x").read_bytes() == values.tobytes()
        assert len(copied) == is_copied * (alignment > 1)


@pytest.mark.parametrize("is_copied", [False, True])
def test_what_is_not_copied_goes_in_larger_pieces(tmp_path, files, monkeypatch, is_copied):
    """More of it is in flight, in no more memory."""
    sizes, write = [], os.pwrite
    monkeypatch.setattr(
        direct.os, "pwrite", lambda fd, *rest: sizes.append(len(rest[0])) or write(fd, *rest)
    )
    monkeypatch.setattr(direct, "memory_alignment", lambda fd: 4096)
    memory = aligned.aligned_empty(20 * 2**20 + 4096)
    values = memory[64:][: 20 * 2**20] if is_copied else memory[: 20 * 2**20]
    files.write(f"{tmp_path}/x", values).result()
    piece = 4 * 2**20 if is_copied else 8 * 2**20
    assert max(sizes) == piece
    assert sum(sizes) == values.nbytes


@pytest.mark.parametrize(("limit_mib", "copied_mib"), [(1, 4), (64, 32), (256, 64), (1024, 64)])
def test_what_is_copied_is_within_the_limit(tmp_path, monkeypatch, limit_mib, copied_mib):
    """But for one piece, if the limit is less."""
    made, empty = [], aligned.aligned_empty
    monkeypatch.setattr(
        aligned, "aligned_empty", lambda nbytes: made.append(nbytes) or empty(nbytes)
    )
    monkeypatch.setattr(direct, "memory_alignment", lambda fd: 4096)
    files = DirectFiles(str(tmp_path), limit_mib * 2**20)
    memory = empty(20 * 2**20 + 4096)[64:][: 20 * 2**20]
    for future in [files.write(f"{tmp_path}/{n}", memory) for n in range(4)]:
        future.result()
    files.close()
    assert files.copied_bytes == copied_mib * 2**20
    assert 0 < sum(made) <= files.copied_bytes


def test_an_old_file_leaves_nothing(tmp_path, files):
    (tmp_path / "x").write_bytes(b"x" * 10_000)
    files.write(f"{tmp_path}/x", np.zeros(3, np.uint8)).result()
    assert (tmp_path / "x").read_bytes() == bytes(3)


def test_who_may_read_a_file_is_up_to_the_system(tmp_path, files):
    (tmp_path / "new").write_bytes(b"")
    for path in ("new_folder/0", "new_folder/1"):  # the first makes its folder
        files.write(f"{tmp_path}/{path}", np.zeros(3)).result()
        assert (tmp_path / path).stat().st_mode == (tmp_path / "new").stat().st_mode


def test_a_folder_may_be_made_by_another_thread_meanwhile(tmp_path, files, monkeypatch):
    make = os.makedirs
    monkeypatch.setattr(os, "makedirs", lambda path, **how: (make(path), make(path, **how)))
    files.write(f"{tmp_path}/leaf/0", np.zeros(3)).result()
    assert (tmp_path / "leaf" / "0").read_bytes() == bytes(24)


def test_errors_name_the_file(tmp_path, files):
    (tmp_path / "x").mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        files.write(f"{tmp_path}/x", np.zeros(3)).result()
    assert caught.value.filename == f"{tmp_path}/x"


@pytest.mark.parametrize("nbytes", [8, 2**20])  # written at once, and by a thread
def test_errors_keep_no_values(tmp_path, files, nbytes):
    """Who is told of a save that has failed may keep the error for long."""
    (tmp_path / "x").mkdir()
    values = np.zeros(nbytes, np.uint8)
    kept, error = weakref.ref(values), files.write(f"{tmp_path}/x", values).exception()
    del values
    files.close()  # its threads have nothing in their hands any more
    assert isinstance(error, IsADirectoryError)
    assert kept() is None


def test_a_save_that_has_been_removed_is_not_begun_anew(tmp_path):
    """What it held would be missing from it, and nobody would be told."""
    folder = tmp_path / "save"
    files = DirectFiles(str(folder), 2**28)
    with pytest.raises(FileNotFoundError):
        files.write(f"{folder}/x/0", np.zeros(3)).result()
    folder.mkdir()
    files.write(f"{folder}/x/0", np.zeros(3)).result()
    files.close()
    assert (folder / "x" / "0").read_bytes() == bytes(24)


@pytest.mark.parametrize("offset", [0, 64])
def test_every_piece_ends_before_a_failure_is_told(tmp_path, files, monkeypatch, offset):
    """A thread that still wrote would write into a file that has been closed, or into another.

    Whether pieces are copied (memory that is not aligned) or written as they lie, by larger ones.
    """
    ended, go_on, wait = {}, threading.Event(), concurrent.futures.wait

    def write(fd, content, start):
        if start > 0:
            assert go_on.wait(60)
        ended[start] = start + len(content)
        if start == 0:
            raise OSError(5, "broken disk")
        return len(content)

    def waited_for(*of, **how):
        go_on.set()
        return wait(*of, **how)

    monkeypatch.setattr(direct.os, "pwrite", write)
    monkeypatch.setattr(concurrent.futures, "wait", waited_for)
    n = 6 * direct.PIECE_BYTES
    base = np.zeros(n + 8192, np.uint8)
    start = -base.ctypes.data % 4096 + offset
    with pytest.raises(OSError, match="broken disk") as caught:
        files.write(f"{tmp_path}/x", base[start : start + n]).result()
    told = dict(ended)
    go_on.set()
    assert caught.value.filename == f"{tmp_path}/x"
    assert len(told) > 2
    assert sorted(told) == [0, *sorted(told.values())[:-1]]
    assert max(told.values()) == n
    assert open_below(tmp_path) == []


def test_a_failure_that_does_not_last_is_one(tmp_path, files, monkeypatch):
    """Only what a file system asks for is tried in another way."""
    failures, write = [OSError(errno.EIO, "broken disk")], os.pwrite

    def fail_once(*of):
        if failures:
            raise failures.pop()
        return write(*of)

    monkeypatch.setattr(direct.os, "pwrite", fail_once)
    with pytest.raises(OSError, match="broken disk"):
        files.write(f"{tmp_path}/x", np.zeros(2**20, np.uint8)).result()


def test_what_has_been_begun_is_written_before_the_threads_end(tmp_path, monkeypatch):
    files, closing, reserve = DirectFiles(str(tmp_path), 2**28), threading.Event(), direct._reserve
    end = files._files.shutdown
    monkeypatch.setattr(files._files, "shutdown", lambda: (closing.set(), end()))
    monkeypatch.setattr(direct, "_reserve", lambda *of: closing.wait(60) and reserve(*of))
    values = np.arange(2**18, dtype=np.float32)
    future = files.write(f"{tmp_path}/x", values)
    files.close()
    future.result()
    assert (tmp_path / "x").read_bytes() == values.tobytes()


def test_no_piece_is_written_when_its_file_has_been_closed(tmp_path, files, monkeypatch):
    """Not where the thread that cuts the pieces fails, either."""
    go_on, ended, wait, close = threading.Event(), [], concurrent.futures.wait, os.close
    path = f"{tmp_path}/x"

    class Digest:
        pieces = 0

        def update(self, content):
            self.pieces += 1
            if self.pieces == 2:  # the first one is being written
                raise MemoryError("of the digest")

    def waited_for(*of, **how):
        go_on.set()
        return wait(*of, **how)

    def is_closed(fd):
        if os.readlink(f"/proc/self/fd/{fd}") == path:
            ended.append("closed")
            go_on.set()
        close(fd)

    monkeypatch.setattr(direct.xxhash, "xxh3_128", Digest)
    monkeypatch.setattr(direct, "_write_all", lambda *_: go_on.wait(60) and ended.append("written"))
    monkeypatch.setattr(concurrent.futures, "wait", waited_for)
    monkeypatch.setattr(direct.os, "close", is_closed)
    with pytest.raises(MemoryError, match="of the digest"):
        files.write(path, np.zeros(3 * direct.PIECE_BYTES, np.uint8)).result()
    assert ended == ["written", "closed"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EOPNOTSUPP])
def test_room_on_the_disk_is_taken_first(tmp_path, files, monkeypatch, code):
    """A full disk is known before anything is written; where none can be taken, writes show it."""
    written, write = [], os.pwrite

    def refuse(fd, offset, nbytes):
        raise OSError(code, "no room")

    monkeypatch.setattr(direct.os, "posix_fallocate", refuse)
    monkeypatch.setattr(direct.os, "pwrite", lambda *of: written.append(of[2]) or write(*of))
    path, values = f"{tmp_path}/x", np.arange(2**18, dtype=np.float32)
    future = files.write(path, values)
    if code == errno.ENOSPC:
        with pytest.raises(OSError, match="no room") as caught:
            future.result()
        assert caught.value.filename == path
        assert written == []
        assert open_below(tmp_path) == []
    else:
        future.result()
        assert pathlib.Path(path).read_bytes() == values.tobytes()


def synced_paths(monkeypatch):
    """The files and folders that are synced from now on."""
    paths, sync = [], os.fsync

    def spied(fd):
        paths.append(os.readlink(f"/proc/self/fd/{fd}"))
        sync(fd)

    monkeypatch.setattr(syncs.os, "fsync", spied)
    return paths


def test_all_is_durable_before_a_save_counts_as_written(tmp_path, monkeypatch):
    """Large and small chunks, what says how they are stored, and the folders that name them."""
    monkeypatch.setattr(direct, "SMALL_BYTES", 2**14)
    monkeypatch.setattr(syncs, "_BATCH_FILES", 3)
    tree = {f"x{n}": jnp.full((n + 1, 1024), n, jnp.float32) for n in range(8)}
    tree["in/a/folder"] = tree["x0"]
    synced, committed = synced_paths(monkeypatch), []
    handler = make_tree_handler(use_ocdbt=False, use_compression=False)
    finalize = handler.finalize
    monkeypatch.setattr(
        handler, "finalize", lambda path: (committed.extend(synced), finalize(path))
    )
    save(handler, tmp_path / "x", host_tree(tree))
    names = [path.partition("orbax-checkpoint-tmp")[2] for path in committed]
    wanted = ["", "/in", "/in/a"]
    wanted += [f"/{x}{file}" for x in tree for file in ("", "/.zarray", "/0.0")]
    assert sorted(name for name in names if name in wanted) == sorted(wanted)  # each of them once


@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_all_of_an_item_is_durable_before_its_commit(tmp_path, monkeypatch, use_ocdbt):
    """Also what Orbax writes, which it leaves to the system: a visible step must not lack it."""
    synced = synced_paths(monkeypatch)
    with GoCkptManager(tmp_path, pytree_options={"use_ocdbt": use_ocdbt}) as manager:
        manager.save(0, args=GoCkptSave({"x": jnp.ones(4)}))
        manager.wait_until_finished()
    item = tmp_path / "0" / "state"
    names = {re.sub(r".*/state[^/]*/?", "", path) for path in synced}  # it is renamed later
    written = {p.relative_to(item).as_posix() for p in item.rglob("*")}
    # TensorStore makes durable what it writes itself, under names that it has for a while.
    of_tensorstore = re.compile(r"_sharding|(ocdbt.process_0/)?(manifest.ocdbt|d(/.*)?)")
    by_us = {name for name in written if not of_tensorstore.fullmatch(name)}
    assert by_us - item_files.LATER_FILES <= names
    assert any(name.startswith("ocdbt.process_0/direct/v/") for name in by_us) == use_ocdbt
    assert "" in names


def test_a_file_that_cannot_be_synced_fails_the_save(tmp_path, monkeypatch):
    def broken(fd):
        raise OSError(5, "broken disk")

    monkeypatch.setattr(syncs.os, "fsync", broken)
    handler = make_tree_handler(use_ocdbt=False, use_compression=False)
    with pytest.raises(OSError, match="broken disk") as caught:
        save(handler, tmp_path / "x", host_tree({"x": jnp.ones(4)}))
    assert "/x/" in str(caught.value.filename)
    assert not (tmp_path / "x").exists()


def test_no_file_stays_open_where_one_beside_the_arrays_cannot_be_opened(tmp_path, monkeypatch):
    """Nor a thread: a save that fails is tried again."""
    for n in range(3):
        (tmp_path / str(n)).write_text("x")
    opened, real, threads_before = [], os.open, set(threading.enumerate())

    def refuse_third(path, *args, **kwargs):
        if str(path).startswith(str(tmp_path)):
            opened.append(path)
            if len(opened) == 3:
                raise OSError(24, "too many open files")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse_third)
    with pytest.raises(OSError, match="too many"):
        item_files.sync_small(epath.Path(tmp_path))
    assert open_below(tmp_path) == []
    assert set(threading.enumerate()) <= threads_before


def test_small_files_are_synced_beside_a_large_one(tmp_path, files, monkeypatch):
    """At the end of a save, each would wait for an entry of the journal more."""
    small = [f"{tmp_path}/leaf/{n}" for n in range(3)]
    for path in small:
        files.write(path, np.zeros(9)).result()
    ended, sync = threading.Semaphore(0), os.fsync
    monkeypatch.setattr(syncs.os, "fsync", lambda fd: (sync(fd), ended.release()))
    files.write(f"{tmp_path}/leaf/large", np.zeros(2**20, np.uint8)).result()
    for _ in [*small, "large"]:
        assert ended.acquire(timeout=60)


def test_the_first_chunk_does_not_wait_for_later_leaves(tmp_path, monkeypatch):
    """Each makes a folder and a file: of thousands that takes a while, and the disk would wait."""
    begun, write = [], DirectFiles.write
    monkeypatch.setattr(
        DirectFiles,
        "write",
        lambda files, path, *value: begun.append(path) or write(files, path, *value),
    )
    handler = make_tree_handler(use_ocdbt=False, use_compression=False)
    save(handler, tmp_path / "x", host_tree({f"x{n}": jnp.ones(4) for n in range(50)}))
    kinds = [path.rpartition("/")[2] for path in begun]
    assert len(kinds) == 100
    assert kinds.index("0") < 10


def test_few_files_are_open_at_one_time(tmp_path, monkeypatch):
    monkeypatch.setattr(syncs, "_BATCH_FILES", 4)
    most, sync, before = [0], os.fsync, len(os.listdir("/proc/self/fd"))

    def counted(fd):
        most[0] = max(most[0], len(os.listdir("/proc/self/fd")))
        sync(fd)

    monkeypatch.setattr(syncs.os, "fsync", counted)
    files = DirectFiles(str(tmp_path), 2**28)
    for future in [files.write(f"{tmp_path}/{n}", np.ones(9)) for n in range(200)]:
        future.result()
    files.sync()
    files.close()
    # Eight wait to be synced; each thread that writes one has it open, and each look one more.
    assert before < most[0] <= before + 8 + direct._FILES + syncs._THREADS
    assert len(os.listdir("/proc/self/fd")) <= before


def test_files_that_cannot_be_synced_keep_no_room_of_others(tmp_path, monkeypatch):
    """They are not open for ever, and a save of more files than may be open fails, too."""
    monkeypatch.setattr(syncs, "_BATCH_FILES", 4)
    monkeypatch.setattr(syncs, "_THREADS", 2)  # of which each is given two files

    def broken(fd):
        raise OSError(errno.EIO, "broken disk")

    monkeypatch.setattr(syncs.os, "fsync", broken)
    files = DirectFiles(str(tmp_path), 2**28)
    for n in range(8):
        files.write(f"{tmp_path}/{n}", np.ones(9)).result()
    with pytest.raises(OSError, match="broken disk"):
        files.sync()
    files.close()
    assert open_below(tmp_path) == []
    assert all(files._syncs._open.acquire(blocking=False) for _ in range(8))


def open_below(folder):
    """Paths of open files in a folder."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    paths = [os.readlink(link) for link in links if os.path.lexists(link)]
    return sorted(path for path in paths if path.startswith(f"{folder}/"))


@pytest.mark.parametrize("nbytes", [4096, 2**20])
@pytest.mark.parametrize("is_cached", [True, False])
def test_what_is_in_the_page_cache_stays_open_until_it_is_synced(
    tmp_path, files, monkeypatch, nbytes, is_cached
):
    """The system tells of failures that come later to who has the file open, and may forget them
    where nobody has. Large values, too, go through the cache where there is no other way."""
    if is_cached:
        monkeypatch.setattr(direct, "O_DIRECT", 0)
    path, values = f"{tmp_path}/x", np.arange(2 * nbytes, dtype=np.uint8)
    files.share(path, 2 * nbytes, [0, nbytes])
    files.write(path, values[:nbytes], 0).result()
    assert open_below(tmp_path) == [path] * (is_cached or nbytes < 2**20)
    files.write(path, values[nbytes:], nbytes).result()
    files.sync()
    assert open_below(tmp_path) == []
    assert pathlib.Path(path).read_bytes() == values.tobytes()


def test_few_files_that_lack_values_are_open_at_one_time(tmp_path, monkeypatch):
    """The others are durable before they are closed."""
    monkeypatch.setattr(direct, "_KEPT_FILES", 2, raising=False)
    files = DirectFiles(str(tmp_path), 2**28)
    paths, synced, sync = [f"{tmp_path}/{n}" for n in range(6)], [], os.fsync

    def recorded(fd):
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        sync(fd)

    monkeypatch.setattr(os, "fsync", recorded)
    for path in paths:
        files.share(path, 8, [0, 4])
        files.write(path, np.full(1, 1, np.int32), 0).result()
    assert open_below(tmp_path) == paths[:2]
    assert synced == paths[2:]
    files.write(paths[0], np.full(1, 2, np.int32), 4).result()
    files.share(f"{tmp_path}/x", 8, [0, 4])
    files.write(f"{tmp_path}/x", np.full(1, 1, np.int32), 0).result()  # has the room of the first
    assert synced == paths[2:]

    def fail(fd):
        raise OSError(errno.EIO, "lost")

    monkeypatch.setattr(os, "fsync", fail)
    files.share(f"{tmp_path}/y", 8, [0, 4])
    with pytest.raises(OSError, match="lost") as raised:
        files.write(f"{tmp_path}/y", np.full(1, 1, np.int32), 0).result()
    assert raised.value.filename == f"{tmp_path}/y"
    files.close()
    assert open_below(tmp_path) == []


def test_many_files_at_once(tmp_path, files):
    values = [np.full(2**18 + n, n, np.uint8) for n in range(40)]
    futures = [files.write(f"{tmp_path}/{n}", v) for n, v in enumerate(values)]
    assert not concurrent.futures.wait(futures).not_done
    assert [(tmp_path / str(n)).read_bytes() == v.tobytes() for n, v in enumerate(values)] == [
        True
    ] * 40


@pytest.mark.parametrize("shape", [(), (7,), (5, 6), (4, 3, 7)])
def test_cells_cover_a_box_once_and_lie_in_one_chunk(shape):
    rng = np.random.default_rng(0)
    for _ in range(50):
        chunk = tuple(rng.integers(1, n + 2) for n in shape)
        starts = [rng.integers(0, n) for n in shape]
        box = tuple(
            slice(a, rng.integers(a + 1, n + 1)) for a, n in zip(starts, shape, strict=True)
        )
        count = np.zeros(shape, int)
        values = np.arange(count.size).reshape(shape)
        for cell in grid.cells(box, chunk):
            count[cell] += 1
            ends = [(s.start // n, (s.stop - 1) // n) for s, n in zip(cell, chunk, strict=True)]
            assert all(first == last for first, last in ends)
            assert np.array_equal(values[box][grid.within(cell, box)], values[cell])
        assert (count[box] == 1).all()
        assert count.sum() == count[box].size


@pytest.mark.parametrize(
    ("kind", "is_local"), [("ext4", True), ("overlay", True), ("nfs4", False), ("", False)]
)
def test_the_default_layout_follows_the_file_system(monkeypatch, kind, is_local):
    monkeypatch.setattr(tree_handler, "file_system", lambda directory: kind)
    uncompressed = {"use_compression": False}
    assert tree_handler.default_layout("/data/run") == (uncompressed if is_local else {})


def test_chunks_and_boxes_that_are_whole():
    box = (slice(4, 8), slice(0, 6))
    assert grid.is_whole(box, (2, 3))
    assert not grid.is_whole(box, (3, 3))
    assert not grid.is_whole((slice(0, 5),), (2,))
    assert not grid.is_whole((slice(1, 4),), (2,))
    assert [grid.key(cell, (2, 3)) for cell in grid.cells(box, (2, 3))] == [
        f"{i}.{j}" for i, j in itertools.product((2, 3), (0, 1))
    ]
