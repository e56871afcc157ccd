"""Which file system holds a directory."""

import pytest

from gockpt_jax.transfer.host_memory import is_in_memory
from gockpt_jax.transfer.mounts import file_system

MOUNTS = """\
/dev/root / ext4 rw 0 0
proc /proc proc rw 0 0
/dev/nvme /gockpt/fast\\040disk xfs rw 0 0
server:/x /gockpt nfs4 rw 0 0
bucket /gockptset fuse.gcsfuse rw 0 0
tmpfs /gockpt/ram tmpfs rw 0 0
/dev/sda1 /gockpt/ram/disk ext3 rw 0 0
/dev/sdb1 /gockpt/größe btrfs rw 0 0
/dev/sdc1 /gockpt/two\u2028lines f2fs rw 0 0
"""


@pytest.fixture
def root(tmp_path):
    (tmp_path / "proc").mkdir()
    # A name that is no text must not keep others from being found.
    table = MOUNTS.encode() + b"tmpfs /gockpt/\xff tmpfs rw 0 0\n"
    (tmp_path / "proc/mounts").write_bytes(table)
    return tmp_path


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs"])
def test_tiers_in_memory(tmp_path, kind):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/mounts").write_text(f"none / {kind} rw 0 0\n")
    assert is_in_memory("/run", tmp_path)


@pytest.mark.parametrize(
    ("directory", "kind"),
    [
        ("/", "ext4"),
        ("/no-such/run", "ext4"),
        ("/gockpt", "nfs4"),
        ("/gockpt/run", "nfs4"),
        ("/gockpt/fast disk/run", "xfs"),
        ("/gockpts", "ext4"),
        ("/gockptset/run", "fuse.gcsfuse"),
        ("/gockpt/ram/run", "tmpfs"),
        ("/gockpt/ram/disk/run", "ext3"),
        ("/gockpt/größe/run", "btrfs"),
        ("/gockpt/two\u2028lines/run", "f2fs"),
        ("gs://bucket/run", ""),
    ],
)
def test_the_innermost_mount_counts(root, directory, kind):
    assert file_system(directory, root) == kind
    assert is_in_memory(directory, root) is (kind == "tmpfs")


def test_links_are_followed(root):
    (root / "link").symlink_to("/gockpt/ram")
    assert file_system(root / "link" / "run", root) == "tmpfs"


def test_the_later_of_two_hides_the_other(root):
    with (root / "proc/mounts").open("a") as table:
        table.write("tmpfs /gockpt tmpfs rw 0 0\n")
    assert file_system("/gockpt/run", root) == "tmpfs"


def test_a_system_that_tells_nothing(tmp_path):
    assert file_system("/gockpt/run", tmp_path) == ""
    (tmp_path / "proc/mounts").mkdir(parents=True)  # may not be read
    assert file_system("/gockpt/run", tmp_path) == ""
