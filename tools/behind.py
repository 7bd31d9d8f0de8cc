"""Links to packages of the interpreter that runs this, for one of another Python version that has fewer.

    python3 tools/behind.py FOLDER NAME...

makes in FOLDER a link for each file and folder of the named distributions and of all that they require. All of the interpreter's packages on the
other's path would be too many: transformers imports what it finds (scikit-learn, Pillow), and their compiled modules are for one Python only.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path


def closure(names: Sequence[str]) -> Iterator[importlib.metadata.Distribution]:
    """The named distributions and what they require without extras, as far as that is installed."""
    waiting, seen = list(names), set()
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        yield found
        for requirement in found.requires or ():
            named = re.match(r"[\w.-]+", requirement)
            if named is not None and "extra ==" not in requirement:
                waiting.append(named[0])


def link(folder: Path, names: Sequence[str]) -> None:
    """Makes the links. What two distributions share is linked once."""
    folder.mkdir(parents=True, exist_ok=True)
    for one in closure(names):
        for top in sorted({file.parts[0] for file in one.files or ()} - {"..", "__pycache__"}):
            if not (folder / top).is_symlink():
                (folder / top).symlink_to(Path(str(one.locate_file(top))).resolve())


if __name__ == "__main__":
    link(Path(sys.argv[1]), sys.argv[2:])
