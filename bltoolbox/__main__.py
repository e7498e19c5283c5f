"""``python -m bltoolbox`` is ``blt``."""

from bltoolbox.cli import main

if __name__ == "__main__":
    main()
