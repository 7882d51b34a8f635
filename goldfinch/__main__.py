"""``python -m goldfinch`` is the command ``goldfinch``."""

from goldfinch.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
