"""`python -m verbatim` and the `verbatim` command: Ctrl-C is handled before the imports start."""

from __future__ import annotations

import gc

from verbatim.cli.lib.interrupt import exit_on_interrupt


def main() -> None:
    gc.disable()  # until the command is imported: modules stay, and collections would visit them
    with exit_on_interrupt():
        from verbatim.cli.main import main as run
    run()


if __name__ == "__main__":
    main()
