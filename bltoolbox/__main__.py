"""The ``blt`` command, also as ``python -m bltoolbox``.

Signal handlers are installed before anything slow is imported: Ctrl-C ends a command without a traceback, even while
it is starting.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from bltoolbox.distributed.signals import Interrupted, end_process, end_process_at_once


def main() -> NoReturn:
    """Run the command in a process of its own."""
    end_process()
    try:
        from bltoolbox.bilevel.memory import keep_freed_memory
        from bltoolbox.cli import main as command
        from bltoolbox.cli.streams import guard_streams

        guard_streams()
        keep_freed_memory()  # the process is ours
        command()
    except Interrupted as stop:
        sys.exit(stop.exit_code)
    finally:
        end_process_at_once()


if __name__ == "__main__":
    main()
