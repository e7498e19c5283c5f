"""``python -m docs.generate FOLDER``: write the generated pages, and name those that changed."""

from __future__ import annotations

import sys
from pathlib import Path

from bltoolbox.runs.files import write_bytes
from docs.generate import pages


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m docs.generate FOLDER", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        path = folder / name
        if not path.is_file() or path.read_bytes() != text.encode():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(path, text.encode())
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
