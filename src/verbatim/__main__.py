"""`python -m verbatim` is the `verbatim` command."""

from __future__ import annotations

from verbatim.cli.main import main

if __name__ == "__main__":
    main()
