"""The licences that ask to be passed on, of the packages whose functions the embedded pairs were trained on.

Most permissive licences ask that copies carry their text and the names of the authors. Weights are no copies of functions; as
they may repeat short pieces of them, the texts are passed on anyway.
"""

import re
import sysconfig
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from specheads.embedded.sources import Row

NAMES = re.compile(r"^(LICEN[CS]E|COPYING|NOTICE)", re.IGNORECASE)
LIBRARY = "Python standard library"
TITLE = (
    "specheads\n\nThe embedded pairs were trained on functions of the Python standard library and of the packages below,\n"
    "under the licences that follow. A text that several packages share stands here once.\n"
)


def notice(rows: Sequence[Row]) -> str:
    """Return the licence texts of installed sources, each with the sources that have it.

    Texts of parts that a package brings along (folders inside its licences) are left out: those were not trained on.
    """
    packages: dict[str, list[str]] = {}  # by text, without differences of layout
    texts: dict[str, str] = {}
    for row in rows:
        for text in licence_texts(row["name"]) or [stated_licence(row)]:
            key = " ".join(text.split()).lower()
            texts.setdefault(key, text.strip("\n").rstrip())
            packages.setdefault(key, []).append(f"{row['name']} {row['version']}")
    parts = [f"{'=' * 100}\n{', '.join(names)}\n{'=' * 100}\n\n{texts[key]}\n" for key, names in packages.items()]
    return "\n".join([TITLE, *parts])


def stated_licence(row: Row) -> str:
    """Return what a source without a licence file says of its licence and its authors."""
    about = metadata.metadata(row["name"])
    authors = about["Author"] or about["Author-email"] or "not named"
    return f"Its licence, as stated: {row['licence']}. Authors: {authors}."


def licence_texts(name: str) -> list[str]:
    """Return the licence files of a source, in the order of their names."""
    if name == LIBRARY:
        paths = [Path(sysconfig.get_path("stdlib")) / "LICENSE.txt"]
    else:
        files = metadata.distribution(name).files or ()
        files = [file for file in files if NAMES.match(file.name) and is_of_the_whole(file)]
        paths = sorted(Path(str(file.locate())) for file in files)
    return [path.read_text(encoding="utf-8", errors="replace") for path in paths if path.is_file()]


def is_of_the_whole(file: metadata.PackagePath) -> bool:
    """Whether a file is the licence of a distribution, and not that of something inside it."""
    folder = file.parent
    return folder.suffix == ".dist-info" or (folder.name == "licenses" and folder.parent.suffix == ".dist-info")
