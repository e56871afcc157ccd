"""Checksums: `verify` finds every way in which a checkpoint is not what was written."""

from __future__ import annotations

import json
import random
import re
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
import xxhash
from click.testing import CliRunner
from jax.sharding import NamedSharding, PartitionSpec
from storage_helpers import assert_same_arrays, example_state, mesh

import gockpt_jax as gockpt
from gockpt_jax.cli.main import main
from gockpt_jax.storage.files import checksum_files, checksums, item_files
from gockpt_jax.storage.files.aligned import PIECE_BYTES
from gockpt_jax.storage.files.checksums import Checksums
from gockpt_jax.storage.inspecting.stored_item import StoredItem, StoredLeafError, for_each
from gockpt_jax.storage.inspecting.verify import verify, verify_item

LAYOUTS = {
    "ocdbt": {"use_ocdbt": True, "use_compression": False},
    "ocdbt_compressed": {"use_ocdbt": True},
    "files": {"use_ocdbt": False, "use_compression": False},
    "files_compressed": {"use_ocdbt": False},
    "files_zarr3": {"use_ocdbt": False, "use_zarr3": True},
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
FOLDER = item_files.FOLDER


def small_state():
    """Chunks that lie in data files (1 KiB and more), one of zeros, and leaves of other kinds."""
    rng = np.random.default_rng(0)
    sharding = NamedSharding(mesh(4, 2), PartitionSpec("data"))
    values = rng.integers(0, 2**32, (16, 160), dtype=np.uint32)
    return {
        "w": jax.device_put(values, sharding),
        "zeros": jax.device_put(jnp.zeros((16, 160)), sharding),
        "half": jax.device_put(jnp.asarray(values[:4] % 7, jnp.bfloat16), jax.devices()[1]),
        "count": jnp.int32(3),
        "numpy": rng.standard_normal((3, 3)),
        "number": 2.5,
        "text": "of a state",
        "nothing": None,
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A manager's directory with step 3, saved once for each layout."""
    made = {}

    def get(layout):
        if layout not in made:
            root = tmp_path_factory.mktemp("saved") / layout
            with gockpt.GoCkptManager(root, pytree_options=LAYOUTS[layout]) as manager:
                manager.save(3, args=gockpt.GoCkptSave(small_state()), metrics={"loss": 1.0})
            made[layout] = root
        return made[layout]

    return get


@pytest.fixture
def item(saved, tmp_path, request):
    """A copy that may be damaged."""
    shutil.copytree(saved(request.getfixturevalue("layout")), tmp_path / "run")
    return tmp_path / "run/3/state"


def faults_of(path):
    return [fault for verdict in verify(path) for fault in verdict.faults]


def data_files(item):
    files = [p for p in item.rglob("*") if p.is_file()]
    return [p for p in files if item_files.holds_chunks(p.relative_to(item).as_posix())]


def flip_bit(path, at):
    content = bytearray(path.read_bytes())
    content[at // 8] ^= 1 << at % 8
    path.write_bytes(content)


def stored(item, name):
    return np.asarray(StoredItem(item).open(name).read().result())


# --- What is whole -------------------------------------------------------------------------------


@every_layout
def test_a_whole_checkpoint_is_whole(saved, layout):
    root = saved(layout)
    verdicts = list(verify(root))
    assert [v.state for v in verdicts] == ["whole", "whole"]
    state = small_state()
    nbytes = sum(np.asarray(x).nbytes for x in jax.tree.leaves(state) if not isinstance(x, str))
    assert verdicts[1].nbytes == nbytes
    assert verdicts[1] == verify_item(root / "3/state", limit_bytes=1, threads=1)
    assert [v.path for v in verify(root / "3")] == [v.path for v in verdicts]
    assert [*verify(root / "3/state")] == verdicts[1:]
    for name, (_, digest) in checksum_files.read_item(root / "3/state").files.items():
        assert (digest is None) == item_files.holds_chunks(name)  # which are not read twice


@pytest.mark.parametrize("save_dtype", [None, "bfloat16"])
def test_every_kind_of_leaf_has_checksums(tmp_path, save_dtype):
    state = example_state()
    args = {}
    if save_dtype is not None:
        state = {k: state[k] for k in ("replicated", "mixed", "numpy", "odd")}
        state["odd"] = state["odd"].at[0].set(jnp.nan)
        one = ocp.SaveArgs(dtype=jnp.dtype(save_dtype), chunk_byte_size=96)
        args["save_args"] = jax.tree.map(lambda _: one, state)
    with gockpt.GoCkptManager(tmp_path) as manager:
        manager.save(0, args=gockpt.GoCkptSave(state, **args))
    verdict = verify_item(tmp_path / "0/state")
    assert verdict.state == "whole", verdict
    assert verdict.chunks >= len([x for x in jax.tree.leaves(state) if isinstance(x, jax.Array)])


def test_one_checksum_of_several_chunks(tmp_path):
    """Stock writes a NumPy array as a whole; its chunks are columns of it."""
    state = {"x": np.arange(4096.0).reshape(2, 2048)}
    args = {"x": ocp.SaveArgs(chunk_byte_size=2**13)}
    with gockpt.GoCkptManager(tmp_path) as manager:
        manager.save(0, args=gockpt.GoCkptSave(state, save_args=args))
    item = tmp_path / "0/state"
    assert StoredItem(item).plain("x").chunk == (2, 512)
    verdict = verify_item(item)
    assert (verdict.state, verdict.chunks) == ("whole", 1), verdict


@pytest.mark.parametrize("asked", [None, np.float64])
def test_numbers_of_another_byte_order(tmp_path, asked):
    """As HDF5 and FITS files hand them out; TensorStore stores the values as this machine's."""
    state = {"x": np.arange(6, dtype=">f4"), "y": np.arange(2**21, dtype=">i4").reshape(2, -1).T}
    args = jax.tree.map(lambda _: ocp.SaveArgs(dtype=asked and np.dtype(asked)), state)
    with gockpt.GoCkptManager(tmp_path) as manager:
        manager.save(0, args=gockpt.GoCkptSave(state, save_args=args))
        restored = manager.restore(0, args=gockpt.GoCkptRestore(state, cast=True, verify=True))
    for name, values in state.items():
        np.testing.assert_array_equal(restored[name], values)


def test_leaves_that_stock_does_not_write_as_arrays(tmp_path):
    """NumPy's texts, which are scalars, and what a handler of the user's keeps."""

    class Seed(int):
        pass

    class SeedHandler(ocp.type_handlers.StringHandler):
        def typestr(self):
            return "seed"

        def memory_size(self, values):  # which Orbax before 0.12.2 asks for
            return super().memory_size([str(x) for x in values])

        async def serialize(self, values, infos, args=None):
            return await super().serialize([str(x) for x in values], infos, args)

    registry = ocp.type_handlers.create_type_handler_registry(
        *((ty, ocp.type_handlers.get_type_handler(ty)) for ty in (jax.Array, str)),
        (Seed, SeedHandler()),
    )
    options = {"type_handler_registry": registry}
    with gockpt.GoCkptManager(tmp_path, pytree_options=options) as manager:
        manager.save(0, args=ocp.args.PyTreeSave({"w": jnp.ones(4), "x": np.str_("text")}))
        assert manager.restore(0, args=gockpt.GoCkptRestore(verify=True))["x"] == "text"
        manager.save(1, args=ocp.args.PyTreeSave({"w": jnp.ones(4), "x": Seed(3)}))
    told = [(v.state, v.faults, v.notes) for v in verify(tmp_path / "1")]
    assert told[1] == ("unchecked", (), ("`x` has no checksums: it is a `seed`",))


def test_each_of_several_trees_has_its_own_checksums(tmp_path):
    """Orbax begins the items of a save side by side, on one thread."""
    trees = {"a": {"x": jnp.arange(4.0)}, "b": {"y": jnp.zeros((3, 2)), "number": 1}}
    saves = {name: gockpt.GoCkptSave(tree) for name, tree in trees.items()}
    with gockpt.GoCkptManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.Composite(**saves))
        targets = {name: gockpt.GoCkptRestore(tree) for name, tree in trees.items()}
        restored = manager.restore(0, args=ocp.args.Composite(**targets), verify=True)
    assert_same_arrays(dict(restored.items()), trees)


def test_stock_ignores_the_checksums(saved):
    root, state = saved("ocdbt"), small_state()
    with ocp.CheckpointManager(root) as stock:
        # Orbax 0.11.33 restores no `None` in part, of its own saves neither.
        left_out = ("text", "nothing")
        target = {k: v for k, v in state.items() if k not in left_out} | {"number": 0.0}
        args = ocp.args.Composite(state=ocp.args.PyTreeRestore(target, partial_restore=True,
            restore_args=ocp.checkpoint_utils.construct_restore_args(target)))  # fmt: skip
        assert_same_arrays(stock.restore(3, args=args)["state"], {**target, "number": 2.5})
        assert set(stock.item_metadata(3)["state"].keys()) == set(state)


def test_a_share_of_the_chunks_is_read_by_each_process(saved):
    item = saved("ocdbt") / "3/state"
    parts = [verify_item(item, share=(i, 3)) for i in range(3)]
    assert sum(part.chunks for part in parts) == verify_item(item).chunks
    assert all(part.chunks for part in parts)


def test_leaves_are_opened_side_by_side(saved, monkeypatch):
    """In a bucket each takes its time. As many at once as there are reads, and in their order."""
    item, opened, open_one = saved("files_compressed") / "3/state", [], StoredItem.open
    want, threads, all_here = verify_item(item), 3, threading.Barrier(3)

    def wait_for_others(self, name):
        opened.append(name)
        assert threading.current_thread() is not threading.main_thread()
        all_here.wait(60)
        if name in ("numpy", "half"):
            raise StoredLeafError(f"`{name}` cannot be opened: no {name}")
        return open_one(self, name)

    monkeypatch.setattr(StoredItem, "open", wait_for_others)
    verdict = verify_item(item, threads=threads)
    assert sorted(opened) == ["count", "half", "number", "numpy", "w", "zeros"]
    assert list(verdict.faults) == [
        "`half` cannot be opened: no half",
        "`numpy` cannot be opened: no numpy",
    ]
    assert verdict.chunks == want.chunks - 2


# --- What is not ---------------------------------------------------------------------------------


@every_layout
def test_a_flipped_bit_in_a_chunk(item, layout):
    values = np.asarray(small_state()["w"])
    if "compressed" in layout or "zarr3" in layout:
        largest = max(data_files(item), key=lambda p: p.stat().st_size)
        flip_bit(largest, largest.stat().st_size * 4)
    else:
        needle = values[4:8].tobytes()[:1000]
        (file,) = [p for p in data_files(item) if needle in p.read_bytes()]
        flip_bit(file, file.read_bytes().index(needle) * 8 + 77)
        assert (stored(item, "w") != values).sum() == 1  # nothing else would have noticed
    faults = faults_of(item)
    assert len(faults) == 1
    assert "is damaged" in faults[0] or "cannot be read" in faults[0]
    # The largest file of a compressed layout may also hold another leaf's chunk.
    anywhere = "compressed" in layout or "zarr3" in layout
    assert re.search(r"`\w+`, \[" if anywhere else r"`w`, \[", faults[0])


@every_layout
def test_bits_flipped_anywhere_are_found_or_change_nothing(item, layout, tmp_path):
    """Bytes that nothing refers to may change: old nodes of OCDBT's trees, gaps."""
    draw = random.Random(layout)
    state, whole = small_state(), tmp_path / "whole"
    shutil.copytree(item, whole)
    found = 0
    # By size, not by name: OCDBT's names are random. Each bit is as likely as any other.
    files = sorted((p for p in item.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    sizes = [p.stat().st_size for p in files]
    for _ in range(12):
        (file,) = draw.choices(files, sizes)
        flip_bit(file, draw.randrange(file.stat().st_size * 8))
        if faults_of(item):
            found += 1
        else:
            for name in ("w", "zeros", "half", "count", "numpy"):
                np.testing.assert_array_equal(stored(item, name), np.asarray(state[name]))
        shutil.copyfile(whole / file.relative_to(item), file)
    assert found >= 4
    assert faults_of(item) == []


OF_ARRAYS = {
    "files": ["w/.zarray", "numpy/.zarray"],
    "files_zarr3": ["w/zarr.json"],
    "ocdbt": ["manifest.ocdbt", "ocdbt.process_0/manifest.ocdbt"],
}


@pytest.mark.parametrize("layout", OF_ARRAYS)
def test_a_flipped_bit_in_what_says_how_chunks_are_stored(item, layout):
    """Each such file has a digest of its own: what it damages need not show in any value."""
    small = ("_METADATA", "_sharding", "array_metadatas/process_0", *OF_ARRAYS[layout])
    for name in small:
        flip_bit(item / name, 2)
    damaged = {f"`{name}` is damaged: its content has changed" for name in small}
    assert damaged <= set(faults_of(item))


@every_layout
def test_a_truncated_file(item, layout):
    for file in random.Random(0).sample(data_files(item), 2):
        content = file.read_bytes()
        file.write_bytes(content[:-1])
        name = file.relative_to(item).as_posix()
        said = f"`{name}` has {len(content) - 1} bytes, {len(content)} were written"
        assert said in faults_of(item)
        file.write_bytes(content)
    assert faults_of(item) == []


@every_layout
@pytest.mark.parametrize("leaf", ["w", "zeros"])
def test_a_missing_chunk(item, layout, leaf):
    """Also one of zeros, which TensorStore would invent."""
    key = "c/1/0" if "zarr3" in layout else "1.0"
    if layout.startswith("files"):
        (item / leaf / key).unlink()
    else:
        spec = {"driver": "ocdbt", "base": f"file://{item}/", "path": f"{leaf}/"}
        ts.KvStore.open(spec).result().delete_range(ts.KvStore.KeyRange(key, f"{key}~")).result()
    assert any(f"`{leaf}`, [" in f and "cannot be read" in f for f in faults_of(item))


@every_layout
def test_a_foreign_and_a_missing_file(item, layout):
    (item / "d").mkdir(exist_ok=True)
    (item / "d/foreign").write_bytes(b"?")
    (item.parent / "notes.txt").write_text("?")
    (item.parent / "other").mkdir()
    lost = item / "array_metadatas/process_0"
    lost.unlink()
    assert faults_of(item.parent) == [
        "`other` is foreign: no item",
        "`notes.txt` is foreign: no part of a checkpoint",
        "`array_metadatas/process_0` is missing",
        "`d/foreign` is foreign: it was not there when the checkpoint was committed",
    ]
    shutil.rmtree(item)
    assert "the item `state` is missing" in faults_of(item.parent)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (None, "`_CHECKPOINT_METADATA` is missing"),
        ("{", "`_CHECKPOINT_METADATA` is damaged"),
        ("{}", "`_CHECKPOINT_METADATA` names no time of commit"),
    ],
)
@pytest.mark.parametrize("layout", ["ocdbt"])
def test_the_metadata_of_the_step(item, layout, text, fault):
    file = item.parent / "_CHECKPOINT_METADATA"
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    (told,) = (f for f in faults_of(item.parents[1]) if file.name in f)
    assert fault in told


@pytest.mark.parametrize("layout", ["ocdbt"])
def test_what_says_that_an_item_is_a_tree(item, layout):
    """Without all of it nobody would look for its chunks."""
    shutil.rmtree(item / FOLDER)
    (item / "_METADATA").unlink()
    assert faults_of(item.parents[1]) == ["it holds no tree of arrays"]


def rewrite(item, change, process=0):
    """Changes what the checksums say, and makes them agree among themselves again."""
    file = item / FOLDER / f"process_{process}.json"
    content = json.loads((item / FOLDER / "process_0.json").read_text())
    change(content)
    file.write_text(json.dumps(content))
    whole = json.loads((item / FOLDER / "item.json").read_text())
    name = f"{FOLDER}/{file.name}"
    whole["files"][name] = [file.stat().st_size, xxhash.xxh3_128_hexdigest(file.read_bytes())]
    whole["processes"] = sorted({*whole["processes"], process})
    whole["digest"] = checksum_files.self_digest(whole)
    (item / FOLDER / "item.json").write_text(json.dumps(whole))


def drop_chunk(content):
    del content["leaves"]["w"]["chunks"][1]


def double_chunk(content):
    content["leaves"]["w"]["chunks"][1] = content["leaves"]["w"]["chunks"][0]


def repeat_often(content):
    """So often that a byte that counts them would be back at one."""
    content["leaves"]["w"]["chunks"] += [content["leaves"]["w"]["chunks"][0]] * 256


def outside(content):
    content["leaves"]["w"]["chunks"][0][1] = [99, 160]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (drop_chunk, "is missing"),
        (double_chunk, "`w`: the chunk at ("),
        (lambda c: c["leaves"]["w"]["chunks"][0].__setitem__(0, [0]), "is not in its shape (16,"),
        (lambda c: c["leaves"]["w"]["chunks"][0].__setitem__(1, [8]), "is not in its shape (16,"),
        (repeat_often, "`w`: the chunk at (0, 0) of its shape (16, 160) is there twice"),
        (outside, "is not in its shape (16, 160)"),
        (lambda c: c["leaves"].pop("zeros"), "`zeros` has no checksums, so it was not written"),
        (lambda c: c["leaves"].update(new=c["leaves"]["w"]), "`new` was written but is not in"),
        (lambda c: c["leaves"]["w"].update(dtype="int32"), "`w`: expected int32, found uint32"),
        (lambda c: c.update(version=2), "has version 2 and algorithm xxh3_128; this gockpt_jax"),
        (lambda c: c.update(algorithm="md5"), "has version 1 and algorithm md5"),
        (lambda c: c.update(format="else"), "expected the format"),
        (lambda c: c.pop("leaves"), "process_0.json` is damaged: KeyError"),
        (lambda c: c.update(leaves=[]), "process_0.json` is damaged: AttributeError"),
        (lambda c: c.update(process_index=4), "is foreign: process 4 wrote it"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
@pytest.mark.parametrize("layout", ["ocdbt"])
def test_checksums_that_do_not_fit(item, layout, change, fault):
    rewrite(item, change)
    assert any(fault in line for line in faults_of(item)), faults_of(item)


@pytest.mark.parametrize("layout", ["ocdbt"])
def test_a_missing_process(item, layout):
    def second(content):
        content["process_index"] = 1
        content["leaves"] = {}

    rewrite(item, second, process=1)
    assert faults_of(item) == []
    (item / FOLDER / "process_1.json").unlink()
    missing = f"process 1 is missing: there is no `{FOLDER}/process_1.json`"
    assert missing in faults_of(item)


@pytest.mark.parametrize("layout", ["ocdbt"])
def test_processes_that_disagree(item, layout):
    def second(content):
        content["process_index"] = 1
        content["leaves"] = {"w": {"dtype": "int32", "chunks": []}}

    rewrite(item, second, process=1)
    assert faults_of(item) == ["`w`: the processes disagree on its dtype"]


@pytest.mark.parametrize("layout", ["ocdbt"])
def test_a_processs_checksums_that_never_came_fail_the_save(item, layout):
    with pytest.raises(RuntimeError, match=r"processes \[1\] of 2 have left no checksums"):
        checksum_files.write_item_file(item, {1, 0})


def test_what_another_handler_has_written_is_not_sealed(tmp_path):
    """Orbax finalizes an item by the first handler under its name."""
    (tmp_path / "_METADATA").write_text("{}")
    checksum_files.write_item_file(tmp_path, {0})
    assert [path.name for path in tmp_path.iterdir()] == ["_METADATA"]


@pytest.mark.parametrize("layout", ["ocdbt"])
def test_a_list_that_knows_nothing_of_what_lies_beside(item, layout):
    """As the first ones did: they stay readable."""
    file = item / FOLDER / "item.json"
    content = json.loads(file.read_text())
    assert content.pop("beside")
    del content["is_part"]
    content["digest"] = checksum_files.self_digest(content)
    file.write_text(json.dumps(content))
    assert [verdict.state for verdict in verify(item.parent)] == ["whole", "whole"]


@pytest.mark.parametrize("layout", ["ocdbt"])
def test_a_part_of_which_other_processes_have_the_rest(item, layout, monkeypatch):
    """Each in storage of its own: what is here is whole if nothing of it has changed."""

    def sealed_after(change):
        rewrite(item, change)
        checksum_files.write_item_file(item, None)
        return faults_of(item)

    def leave_out(content):
        drop_chunk(content)
        del content["leaves"]["zeros"]

    def repeat(content):
        chunks = content["leaves"]["w"]["chunks"]
        chunks.append(chunks[0])

    assert len(sealed_after(leave_out)) == 2
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert sealed_after(lambda content: None) == []
    checksum_files.write_item_file(item, {0})
    assert len(faults_of(item)) == 2  # the others share its storage: nothing may be missing
    assert sealed_after(lambda content: None) == []
    assert verify_item(item, share=(1, 2)) == verify_item(item)  # nobody else reads it
    (fault,) = sealed_after(repeat)
    assert "is there twice" in fault


@pytest.mark.parametrize("layout", ["files"])
def test_the_list_of_files_itself(item, layout):
    file = item / FOLDER / "item.json"
    whole = file.read_text()
    renamed = whole.replace('"files"', '"other"', 1)
    for damaged in (whole.replace("[0]", "[0, 1]", 1), whole[:-4], "[]", renamed):
        file.write_text(damaged)
        told = faults_of(item.parent)  # of its step too: neither knows what lies beside it
        assert any(f"`{FOLDER}/item.json` is damaged" in fault for fault in told)
    file.unlink()
    assert f"`{FOLDER}/item.json` is missing" in faults_of(item.parent)


# --- The machinery -------------------------------------------------------------------------------


def test_digests_do_not_depend_on_how_the_bytes_lie():
    x = np.random.default_rng(0).standard_normal((3, 700, 600)).astype(np.float32)
    assert x.nbytes > PIECE_BYTES
    views = [x, np.asfortranarray(x), np.pad(x, 1)[1:-1, 1:-1, 1:-1], np.flip(np.flip(x).copy())]
    assert len({checksums.digest(v) for v in views}) == 1
    assert checksums.digest(x.swapaxes(0, 1)) != checksums.digest(x)
    int4 = [np.array([n], np.uint8).view(jnp.int4) for n in (0x01, 0xF1)]  # upper bits are nobody's
    assert checksums.digest(int4[0]) == checksums.digest(int4[1])
    assert checksums.digest(np.float32(1)[None][0].reshape(())) == xxhash.xxh3_128_hexdigest(
        np.float32(1).tobytes()
    )


def test_narrow_parts_of_rows_are_digested_many_at_a_time(monkeypatch):
    x = np.arange(2**21, dtype=np.float32).reshape(-1, 8)[:, :2]  # 2**18 rows of 8 bytes
    want, pieces = checksums.digest(x.copy()), []
    digest_of = checksums.digest_of
    monkeypatch.setattr(
        checksums, "digest_of", lambda parts: digest_of(pieces.extend(parts) or pieces)
    )
    assert checksums.digest(x) == want
    assert len(pieces) == 1


def test_checksums_are_sealed_when_the_steps_metadata_has_been_noted(tmp_path, monkeypatch):
    """They tell of it, too: Orbax notes it on a thread of its own."""
    done, seal = [], checksum_files.write_item_file
    monkeypatch.setattr(
        checksum_files, "write_item_file", lambda *a: done.append("sealed") or seal(*a)
    )
    with gockpt.GoCkptManager(tmp_path) as manager:
        handler = manager._gockpt_handler
        wait = handler.wait_for_metadata
        monkeypatch.setattr(handler, "wait_for_metadata", lambda: wait() or done.append("noted"))
        manager.save(0, args=gockpt.GoCkptSave({"w": jnp.ones(3)}))
    assert done == ["noted", "sealed"]


def test_a_failed_save_leaves_no_checksums(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("no room for checksums")

    with gockpt.GoCkptManager(tmp_path) as manager:
        manager.save(0, args=gockpt.GoCkptSave(small_state()))
        manager.wait_until_finished()
        monkeypatch.setattr(Checksums, "write", refuse)
        manager.save(1, args=gockpt.GoCkptSave(small_state()))
        with pytest.raises(OSError, match="no room for checksums"):
            manager.wait_until_finished()
        assert manager.all_steps() == [0]
    assert [v.state for v in verify(tmp_path)] == ["whole", "whole"]


def test_reads_are_bounded_and_their_errors_are_raised():
    running, most = [], []

    def work(i):
        running.append(i)
        most.append(len(running))
        running.remove(i)
        if i == 50:
            raise ValueError("job 50")
        return i

    def of_10_bytes(count, **limits):
        return list(for_each(range(count), work, nbytes=lambda _: 10, **limits))

    assert of_10_bytes(40, limit_bytes=25, threads=8) == list(range(40))
    assert max(most) <= 2
    with pytest.raises(ValueError, match="job 50"):
        of_10_bytes(99, limit_bytes=5)


# --- The command ---------------------------------------------------------------------------------


def run(*args):
    return CliRunner().invoke(main, ["verify", *map(str, args)])


@pytest.mark.parametrize("layout", ["ocdbt"])
def test_exit_codes(item, layout, tmp_path):
    root = item.parent.parent
    assert run(root).exit_code == 0
    assert "whole" in run(root).output
    found = json.loads(run(item, "--json").output)["found"]
    assert [(v["state"], v["faults"]) for v in found] == [("whole", [])]

    with ocp.CheckpointManager(root) as stock:
        stock.save(4, args=ocp.args.Composite(state=ocp.args.StandardSave({"x": jnp.ones(3)})))
    result = run(root)
    assert result.exit_code == 3
    assert "it has no checksums" in result.output
    notes = [note for v in json.loads(run(root, "--json").output)["found"] for note in v["notes"]]
    assert [note for note in notes if "it has no checksums" in note]
    assert run(root, "--newest").exit_code == 3
    assert run(root / "3").exit_code == 0

    (item / "_METADATA").write_text("{}")
    result = run(root, "--json")
    assert result.exit_code == 1
    assert any("_METADATA" in f for v in json.loads(result.output)["found"] for f in v["faults"])
    assert run(root, "--newest").exit_code == 3  # the damaged one is older

    for nothing in (tmp_path / "absent", tmp_path):
        assert run(nothing / "x").exit_code == 2
    (tmp_path / "empty").mkdir()
    result = run(tmp_path / "empty")
    assert result.exit_code == 2
    assert "holds no checkpoint: found nothing. Give the directory of a" in result.output
