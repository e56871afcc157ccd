"""The files of an item against the list that was made of them just before its commit."""

from collections.abc import Mapping, Sequence

from etils import epath

from gockpt_jax.storage.files import beside, checksum_files, item_files
from gockpt_jax.storage.files.checksum_files import ChecksumError, ItemFile

_UNKNOWN = ItemFile({}, [0], False, beside.Beside({}, {}), False)


def check_files(item: epath.Path) -> tuple[list[str], ItemFile]:
    """Compares the item's files with the list made at its commit; returns what that says, too.

    Reads the small ones. Of those that hold chunks only the sizes are compared.
    """
    try:
        listed = checksum_files.read_item(item)
    except FileNotFoundError:
        return [f"`{item_files.ITEM_FILE}` is missing"], _UNKNOWN
    except OSError as error:
        return [f"`{item_files.ITEM_FILE}` cannot be read: {error}"], _UNKNOWN
    except ChecksumError as error:
        return [str(error)], _UNKNOWN
    if listed.is_intact:
        return compare(item, listed.files), listed
    return [f"`{item_files.ITEM_FILE}` is damaged: it does not have its own digest"], listed


def compare(
    item: epath.Path, listed: Mapping[str, tuple[int, str | None]], below: str = ""
) -> list[str]:
    """What has become of an item's files; `below` stands before their names."""
    sizes = dict(item_files.files_of(item))
    faults = [f"`{below}{name}` is missing" for name in sorted(listed.keys() - sizes.keys())]
    faults += [
        f"`{below}{name}` is foreign: it was not there when the checkpoint was committed"
        for name in sorted(sizes.keys() - listed.keys())
    ]
    of_size = []
    for name in sorted(listed.keys() & sizes.keys()):
        if sizes[name] == listed[name][0]:
            of_size.append(name)
        else:
            had = f"{sizes[name]} bytes, {listed[name][0]} were written"
            faults.append(f"`{below}{name}` has {had}")
    small = [name for name in of_size if listed[name][1]]
    for name, digest in _digests(item, small).items():
        if isinstance(digest, OSError):
            faults.append(f"`{below}{name}` cannot be read: {digest}")
        elif digest != listed[name][1]:
            faults.append(f"`{below}{name}` is damaged: its content has changed")
    return faults


def _digests(item: epath.Path, names: Sequence[str]) -> Mapping[str, str | OSError]:
    """Of small files; where one cannot be read, of each alone."""
    try:
        return item_files.file_digests(item, names)
    except OSError as error:
        if len(names) == 1:
            return {names[0]: error}
        return {name: _digests(item, [name])[name] for name in names}
