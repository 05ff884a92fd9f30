"""`python -m verbatim` and the `verbatim` command: Ctrl-C is handled before the imports start."""

from __future__ import annotations

from verbatim.cli.lib.interrupt import exit_on_interrupt


def main() -> None:
    with exit_on_interrupt():
        from verbatim.cli.main import main as run
    run()


if __name__ == "__main__":
    main()
