"""`gockpt_jax inspect` and `gockpt_jax diff`, on real checkpoints of several layouts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import nursery
import orbax.checkpoint as ocp
import pytest
from click.testing import CliRunner
from jax.sharding import NamedSharding, PartitionSpec

from gockpt_jax import GoCkptManager, GoCkptSave, VerifyError
from gockpt_jax.checks import describe_bytes
from gockpt_jax.cli import diff as diff_command
from gockpt_jax.cli import verify as verify_command
from gockpt_jax.cli.main import main
from gockpt_jax.storage.inspecting import directory
from gockpt_jax.storage.inspecting.diff import diff_items
from gockpt_jax.storage.inspecting.stored_item import READ_LIMIT_BYTES, READ_THREADS
from gockpt_jax.storage.inspecting.verdict import Verdict


def run(*words):
    result = CliRunner().invoke(main, [*map(str, words)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def state():
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    w = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)
    return {
        "w": jax.device_put(w, NamedSharding(mesh, PartitionSpec("data", None))),
        "b": jnp.asarray([1.0, -0.0, jnp.nan], jnp.bfloat16),
        "n": jnp.arange(4),
        "x[dim]": jnp.ones(3),  # brackets are markup to the tables
        "name": "a run",
        "empty": {},
    }


def saved(root, tree, step=0, metadata=None, **options):
    with GoCkptManager(root, pytree_options=options) as manager:
        manager.save(step, args=GoCkptSave(tree, custom_metadata=metadata))
    return root


# --- inspect -------------------------------------------------------------------------------------


def test_inspect_shows_everything_but_the_values(tmp_path):
    root = saved(tmp_path / "run", state(), 7, {"note": "[first]"}, use_zarr3=True, use_ocdbt=True)
    (root / "8.orbax-checkpoint-tmp-1").mkdir()
    told = json.loads(run("inspect", root, "--json").output)
    assert (told["kind"], told["leftovers"]) == ("root", ["8.orbax-checkpoint-tmp-1"])
    assert told["steps"][0]["items"] == ["state"]
    (item,) = told["items"]
    assert item["layout"] == {"store": "ocdbt", "zarr": 3}
    assert item["checksums"] == {"version": 1, "algorithm": "xxh3_128", "processes": [0]}
    assert item["custom_metadata"]["note"] == "[first]"
    leaves = {leaf["name"]: leaf for leaf in item["leaves"]}
    assert leaves["w"].pop("chunk") in ([4, 8], [2, 8])  # a shard, or what one replica writes of it
    assert leaves["w"] == {
        "name": "w", "type": "jax.Array", "dtype": "float32", "shape": [16, 8],
        "bytes": 512, "placement": "(data, -) on data=4, model=2",
    }  # fmt: skip
    assert leaves["name"]["value"] == "a run"
    assert item["bytes"] == 512 + 6 + 16 + 12
    text = run("inspect", root).output
    for word in ("x[dim]", "16x8", "ocdbt, zarr v3", "[first]", "8.orbax-checkpoint-tmp-1"):
        assert word in text
    assert f"on disk:   {describe_bytes(item['bytes_on_disk'])} in {item['files']} files" in text
    assert json.loads(run("inspect", root / "7", "--json").output)["kind"] == "step"
    assert json.loads(run("inspect", root / "7/state", "--json").output)["kind"] == "item"
    assert "committed" in text
    assert "committed" not in run("inspect", root / "7/state").output  # nobody knows of its step


def test_inspect_of_what_stock_has_saved(tmp_path):
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    places = (PartitionSpec(("data", "model")), PartitionSpec(None, "model"), PartitionSpec())
    x = np.ones((8, 2), np.float32)
    tree = {str(n): jax.device_put(x, NamedSharding(mesh, p)) for n, p in enumerate(places)}
    with ocp.CheckpointManager(tmp_path) as stock:
        stock.save(0, args=ocp.args.StandardSave(tree))
    (item,) = json.loads(run("inspect", tmp_path, "--json").output)["items"]
    assert item["checksums"] is None
    assert [leaf["placement"].partition(" on ")[0] for leaf in item["leaves"]] == [
        "(data+model)", "(-, model)", "()",
    ]  # fmt: skip
    assert "checksums: none\nmetadata:  none\n" in run("inspect", tmp_path).output


def test_names_are_no_markup(tmp_path):
    root = tmp_path / "run[lr=1]"
    mesh = NamedSharding(jax.make_mesh((8,), ("[data]",)), PartitionSpec("[data]"))
    with GoCkptManager(root) as manager:
        tree = GoCkptSave({"w": jax.device_put(jnp.ones(8), mesh)})
        manager.save(0, args=ocp.args.Composite(**{"ema[slow]": tree}))
    assert run("verify", root).output.count("run[lr=1]/0/ema[slow]") == 1
    text = run("inspect", root).output
    assert text.count("ema[slow]") == 2  # among the items, and above leaves
    assert "([data]) on [data]=8" in text


def test_inspect_of_what_is_damaged(tmp_path):
    root = saved(tmp_path, {"w": jnp.ones(3)})
    (root / "0/_CHECKPOINT_METADATA").write_text("{}")
    (root / "0/state/_sharding").write_text("?")
    (root / "0/state/_gockpt_checksums/item.json").write_text("{}")
    found = json.loads(run("inspect", root, "--json").output)
    told = found["items"][0]
    assert "item.json` is damaged" in told["checksums"]["error"]
    assert told["leaves"][0]["placement"] is None
    text, fault = run("inspect", root).output, "names no time of commit: the save never ended"
    assert "│ never" in text
    assert fault in text
    assert fault in found["steps"][0]["faults"][0]
    (root / "0/_CHECKPOINT_METADATA").write_text('{"commit_timestamp_nsecs": 1%s}' % ("0" * 30))
    assert "never" in run("inspect", root).output


def test_inspect_of_nothing(tmp_path):
    assert run("inspect", tmp_path / "absent").exit_code == 2
    assert "there is no such directory" in run("inspect", tmp_path / "absent").output
    assert "Shells expand `~`" in run("inspect", "~/absent").output
    (tmp_path / "notes.txt").touch()
    (tmp_path / "7.orbax-checkpoint-tmp").mkdir()
    result = run("inspect", tmp_path)
    assert result.exit_code == 2
    assert "holds no checkpoint: found saves that never ended: `7.orbax-ch" in result.output
    assert "Give the directory of a manager, of a step, or of an item." in result.output
    result = run("inspect", tmp_path, "--json")
    assert (result.exit_code, json.loads(result.stdout)["others"]) == (2, ["notes.txt"])
    for command in (
        ["inspect"],
        ["verify"],
        ["plan", "--step", "1", "--memory", "1GB", "--checkpoint"],
    ):
        result = run(*command, tmp_path / "notes.txt")
        assert result.exit_code == 2
        assert "found a file" in result.output


@pytest.mark.parametrize("words", [["inspect"], ["verify"], ["diff", "."]], ids=str)
def test_an_empty_path_is_not_the_working_directory(tmp_path, monkeypatch, words):
    """It is a variable of the shell's that nobody has set."""
    saved(tmp_path / "here", state())
    monkeypatch.chdir(tmp_path / "here")
    assert run(*words, ".").exit_code == 0
    result = run(*words, "")
    assert result.exit_code == 2
    assert "expected the path of a directory of checkpoints, got an empty one" in result.output


def test_inspect_shows_the_steps_where_the_newest_cannot_be_read(tmp_path):
    with GoCkptManager(tmp_path) as manager:
        for step in (6, 7):
            manager.save(step, args=GoCkptSave({"w": jnp.ones(3)}))
    (tmp_path / "7/state/manifest.ocdbt").write_text("?")
    result = run("inspect", tmp_path)
    assert result.exit_code == 2
    assert "│ 6 " in result.stdout
    assert "`w` cannot be opened" in result.stderr
    result = run("inspect", tmp_path, "--json")
    told = json.loads(result.stdout)
    assert (result.exit_code, len(told["steps"]), told["items"]) == (2, 2, [])


# --- diff ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("diff") / "base", state())


@pytest.mark.parametrize("layout", [{"use_ocdbt": False}, {"use_zarr3": True}], ids=str)
def test_layout_and_placement_are_no_difference(tmp_path, base, layout):
    tree = state() | {"w": jnp.asarray(np.asarray(state()["w"]))}
    other = saved(tmp_path / "other", tree, 3, **layout)
    result = run("diff", base, other / "3")
    assert (result.exit_code, result.output) == (0, "")
    assert run("diff", other / "3/state", base / "0/state").exit_code == 0


def test_every_kind_of_difference(tmp_path, base):
    tree = state()
    w = np.array(tree["w"])
    w[3, 4] = np.nextafter(w[3, 4], np.float32(9))
    w[9, 1] = np.nextafter(np.nextafter(w[9, 1], np.float32(9)), np.float32(9))
    step = abs(float(w[9, 1]) - float(np.asarray(tree["w"])[9, 1]))
    tree |= {
        "w": jnp.asarray(w), "b": jnp.ones((3,)), "n": jnp.arange(5), "name": "another", "new": 1,
        "empty": None,
    }  # fmt: skip
    del tree["x[dim]"]
    other = saved(tmp_path / "other", tree)
    found = {leaf.name: leaf for leaf in diff_items(base / "0/state", other / "0/state")}
    kinds = {name: leaf.kind for name, leaf in found.items()}
    assert kinds == {
        "w": "values", "b": "dtype", "n": "shape", "name": "values", "new": "only in B",
        "x[dim]": "only in A", "empty": "type",
    }  # fmt: skip
    assert (found["w"].elements, found["w"].size, found["w"].max_ulps) == (2, 128, 2)
    assert found["w"].max_absolute == pytest.approx(step, rel=0.5)
    scale = float(np.abs(np.asarray(state()["w"])).max())
    assert found["w"].max_relative == pytest.approx(found["w"].max_absolute / scale)
    assert (found["n"].a, found["n"].b) == ("int32[4]", "int32[5]")
    result = run("diff", base, other)
    assert result.exit_code == 1
    assert "2 of 128" in result.output
    told = json.loads(run("diff", base, other, "--json", "--limit-mib", "1").output)["differing"]
    assert {leaf["name"] for leaf in told} == set(kinds)


def test_each_figure_of_a_difference_has_its_column(tmp_path):
    w, n = np.array([1.0, 4.0], np.float32), np.array([2], np.int32)
    a = saved(tmp_path / "a", {"w": w, "n": n, "s": n})
    b = saved(tmp_path / "b", {"w": w + np.float32([0, 0.5]), "n": n + 3, "s": n.astype("f4")})
    lines = run("diff", a, b).output.splitlines()
    rows = [[x.strip() for x in line.split("│")[1:-1]] for line in lines if line[0] == "│"]
    assert sorted(rows) == [
        ["n", "values", "int32[1]", "int32[1]", "1 of 1", "-", "3", "1.5"],
        ["s", "dtype", "int32[1]", "float32[1]", "", "", "", ""],
        ["w", "values", "float32[2]", "float32[2]", "1 of 2", str(2**20), "0.5", "0.125"],
    ]


def test_one_of_several_trees_is_compared_where_it_is_named(tmp_path):
    ones, zeros = (GoCkptSave({"w": w}) for w in (jnp.ones(2), jnp.zeros(2)))
    for name, ema in (("a", zeros), ("b", ones)):
        with GoCkptManager(tmp_path / name) as manager:
            manager.save(0, args=ocp.args.Composite(state=ones, ema=ema))
    a, b = tmp_path / "a", tmp_path / "b"
    assert run("diff", a, b, "--item", "state").exit_code == 0
    assert run("diff", a, b, "--item", "ema").exit_code == 1
    # What an item's own path says needs no name.
    assert run("diff", a / "0/state", b / "0/ema", "--item", "state").exit_code == 0


def test_what_is_read_at_one_time_is_what_was_asked_for(tmp_path, monkeypatch, base):
    told = []

    def note(*paths, **given):
        told.append(given)
        return []

    monkeypatch.setattr(diff_command, "diff_items", note)
    monkeypatch.setattr(verify_command, "verify_all", note)
    for words in ((), ("--limit-mib", 3)):
        run("diff", base, base, *words)
        run("verify", tmp_path, *words)
    run("verify", tmp_path, "--newest", "--threads", 5)
    limits = [READ_LIMIT_BYTES, READ_LIMIT_BYTES, 3 << 20, 3 << 20, READ_LIMIT_BYTES]
    assert [given["limit_bytes"] for given in told] == limits
    verified = [(given["newest"], given["threads"]) for given in told if "threads" in given]
    assert verified == [(False, READ_THREADS), (False, READ_THREADS), (True, 5)]


def test_what_was_read_is_told_for_all_that_was_verified(tmp_path, monkeypatch):
    found = [Verdict("a", chunks=1, nbytes=3 << 20), Verdict("b", chunks=1, nbytes=4 << 20)]
    monkeypatch.setattr(verify_command, "verify_all", lambda *_, **__: found)
    assert "7.0 MiB in " in run("verify", tmp_path).output


def test_leaves_of_other_types_are_told_and_not_read(tmp_path):
    a = saved(tmp_path / "a", {"x": jnp.ones(3), "y": "text", "z": "text"})
    b = saved(tmp_path / "b", {"x": "text", "y": jnp.ones(3), "z": "text"})
    found = [(x.name, x.kind, x.a, x.b) for x in diff_items(a / "0/state", b / "0/state")]
    assert found == [("x", "type", "float32[3]", "string"), ("y", "type", "string", "float32[3]")]


def test_typed_keys_are_no_arrays(tmp_path):
    """Nor are they those of another algorithm, though their data are alike."""
    key = jax.random.key(5, impl="rbg")
    same = {"a": key, "b": jax.random.key_data(key)}
    other = {"a": jax.random.key_data(key), "b": jax.random.key(5, impl="unsafe_rbg")}
    for name, state in {"one": same, "same": same, "other": other}.items():
        with GoCkptManager(tmp_path / name) as manager:
            manager.save(0, args=GoCkptSave(state))
    assert not list(diff_items(tmp_path / "one/0/state", tmp_path / "same/0/state"))
    found = diff_items(tmp_path / "one/0/state", tmp_path / "other/0/state")
    assert [(x.name, x.kind, x.a, x.b) for x in found] == [
        ("a", "type", "key<rbg>", "uint32[4]"),
        ("b", "type", "uint32[4]", "key<unsafe_rbg>"),
    ]


def test_inspect_tells_keys_from_their_data(tmp_path):
    key = jax.random.key(5, impl="rbg")
    with GoCkptManager(tmp_path) as manager:
        tree = {"a": key, "b": jax.random.key_data(key), "c": "a [text]", "d": jnp.float32(1)}
        manager.save(0, args=GoCkptSave(tree))
    (item,) = json.loads(run("inspect", tmp_path, "--json").output)["items"]
    assert [leaf.get("random_key") for leaf in item["leaves"]] == ["rbg", None, None, None]
    text = run("inspect", tmp_path).output
    assert text.count("uint32, key<rbg>") == 1
    assert text.count("│ scalar ") == 2  # its shape and its chunk
    assert '"a [text]"' in text


def test_texts_below_names_with_slashes(tmp_path):
    """Orbax keeps a text under its leaf's name as a JSON pointer."""
    trees = [{"a/b": "text", "a/0": "same", "c~1d": text, "x/y": text} for text in ("1", "2")]
    items = [saved(tmp_path / text, trees[n]) / "0/state" for n, text in enumerate("12")]
    assert [(x.name, x.kind, x.a, x.b) for x in diff_items(*items)] == [
        (name, "values", "'1'", "'2'") for name in ("c~1d", "x/y")
    ]
    told = json.loads(run("inspect", tmp_path / "1", "--json").output)
    assert '"value": "text"' in json.dumps(told)


def test_bits_that_compare_equal_are_differences_of_no_ulps(tmp_path, base):
    tree = state() | {"b": jnp.asarray([1.0, 0.0, jnp.nan], jnp.bfloat16)}
    (found,) = diff_items(base / "0/state", saved(tmp_path, tree) / "0/state")
    assert (found.name, found.elements, found.max_ulps, found.max_absolute) == ("b", 1, 0, 0)
    tree = state() | {"n": jnp.asarray([0, 1, 2, 9]), "b": jnp.zeros(3, jnp.bfloat16)}
    found = {x.name: x for x in diff_items(
        base / "0/state", saved(tmp_path / "ints", tree) / "0/state")}  # fmt: skip
    assert (found["n"].max_ulps, found["n"].max_absolute) == (None, 6)
    assert found["b"].max_ulps is None  # one of the two is not finite


def test_differences_that_float64_cannot_hold(tmp_path):
    most, tiny = np.finfo("f8").max, np.finfo("f8").tiny
    trees = [
        {"sign": np.array([most, 1.0]), "scale": np.array([tiny]), "pair": np.array([1j * most])},
        {"sign": np.array([-most, 1.0]), "scale": np.array([1.0]), "pair": np.array([-1j * most])},
    ]
    roots = [saved(tmp_path / str(n), tree) for n, tree in enumerate(trees)]
    found = {x.name: x for x in diff_items(*(root / "0/state" for root in roots))}
    assert {name: (x.max_absolute, x.max_relative) for name, x in found.items()} == {
        "sign": (np.inf, np.inf), "scale": (1.0, 1 / tiny), "pair": (np.inf, np.inf),
    }  # fmt: skip
    text = run("diff", "--json", *roots).output
    told = {x["name"]: x for x in json.loads(text, parse_constant=pytest.fail)["differing"]}
    assert (told["sign"]["max_absolute"], told["sign"]["max_relative"]) == (most, most)
    assert told["scale"]["max_absolute"] == 1.0
    assert "inf" in run("diff", *roots).output


def test_what_cannot_be_compared(tmp_path, base):
    for wrong in (tmp_path / "absent", tmp_path):
        assert run("diff", base, wrong).exit_code == 2
    (base / "0/state").rename(base / "0/model")
    try:
        told = run("diff", base, base, "--item", "x").output
        assert "expected the tree `x`, found `model`" in told
        (base / "0/model").rename(base / "kept")
        told = run("diff", base, base).output
        assert "expected one tree, found none in the newest checkpoint, `0`. Give" in told
        (base / "kept").rename(base / "0/model")
    finally:
        (base / "0/model").rename(base / "0/state")


def test_an_item_that_may_not_be_read_is_told_of(tmp_path, monkeypatch):
    """Whether it is a tree nobody can see then: what it would have in it is not there."""
    item = saved(tmp_path, {"w": jnp.ones(3)}) / "0/state"
    entries, is_tree = directory._entries, directory.is_tree

    def refused(path):
        if str(path) == str(item):
            raise PermissionError(13, "Permission denied", str(path))
        return entries(path)

    monkeypatch.setattr(directory, "_entries", refused)
    monkeypatch.setattr(directory, "is_tree", lambda path: str(path) != str(item) and is_tree(path))
    told = f"the item `state` cannot be read: [Errno 13] Permission denied: '{item}'"
    assert told in json.loads(run("inspect", tmp_path, "--json").output)["steps"][0]["faults"]
    result = run("verify", tmp_path, "--json")
    assert result.exit_code == 1
    assert told in json.loads(result.output)["found"][0]["faults"]


def test_of_what_is_damaged_the_leaf_is_told(tmp_path):
    """And not a page of how TensorStore was asked for it."""
    tree = {"w": jnp.arange(3.0), "name": "a run"}
    a, b = (saved(tmp_path / name, tree, use_ocdbt=False) / "0/state" for name in "ab")
    (b / "w/0").unlink()
    what_for = {"w/0": "`w` cannot be read: ", "w/.zarray": "`w` cannot be opened: "}
    for file, told in what_for.items():
        (b / file).unlink(missing_ok=True)
        plan = ("plan", "--step", "1", "--memory", "80GB", "--checkpoint")
        asked = [("diff", a, b), ("diff", b, a)]
        asked += [("inspect", b), (*plan, b)] if file == "w/.zarray" else []
        for words in asked:
            result = run(*words)
            assert result.exit_code == 2
            assert told in result.output
            assert "`gockpt_jax verify` names all" in result.output
            assert "tensorstore_spec" not in result.output
    for file in ("_strings.json", "_METADATA"):
        (a / file).write_bytes(b"\x98" * 300)
        for words in (("diff", b, a), ("inspect", a)):
            result = run(*words)
            assert result.exit_code == 2
            assert f"`{file}` in {a} is damaged: UnicodeDecodeError: " in result.output
            assert "x98" * 3 not in result.output


@pytest.mark.parametrize("words", [["verify"], ["inspect", "--json"], ["--help"]], ids=str)
def test_what_cannot_be_printed_is_no_damage(base, words, tmp_path):
    """1 would say that the checkpoint is damaged."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])

    def ended(out):
        with (tmp_path / "err").open("w+") as err:
            process = nursery.start(
                "gockpt_jax", *words, *([] if "--help" in words else [str(base)]),
                env=os.environ | {"PYTHONPATH": path}, cwd=tmp_path, stdout=out, stderr=err,
            )  # fmt: skip
            return process.wait(300), (tmp_path / "err").read_text()

    read, write = os.pipe()
    os.close(read)  # as of `| head`, which has gone
    with os.fdopen(write, "wb") as gone, open("/dev/full", "wb") as full:
        assert ended(gone) == (141, "")
        status, told = ended(full)
    assert status == 2
    assert told.startswith("Error: what was asked for cannot be printed: [Errno 28]")


def test_of_many_strangers_a_few_are_named(tmp_path):
    for n in range(20):
        (tmp_path / f"notes-{n:02}").touch()
    text = run("inspect", tmp_path).output
    assert "`notes-04` and 15 more" in text
    assert "notes-05" not in text


def test_of_many_damaged_leaves_the_first_are_named(tmp_path):
    """A missing file is a fault of each leaf in it: an error of thousands of lines tells nobody."""
    with GoCkptManager(tmp_path) as manager:
        manager.save(0, args=GoCkptSave({f"leaf-{n:02}": jnp.ones(300) for n in range(30)}))
        manager.wait_until_finished()
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        max(files, key=lambda path: path.stat().st_size).unlink()
        with pytest.raises(VerifyError, match="leaf-05") as caught:
            manager.restore(0, verify=True)
    (found,) = [v for v in json.loads(run("verify", tmp_path, "--json").output)["found"]
                if v["state"] == "damaged"]  # fmt: skip
    assert sum("leaf-" in fault for fault in found["faults"]) == 30
    more = f"and {len(found['faults']) - 20} more: `gockpt_jax verify --json` names all"
    text = run("verify", tmp_path).output
    for told in (text.replace("\n", " "), str(caught.value)):
        assert more in told
        assert "leaf-29" not in told
