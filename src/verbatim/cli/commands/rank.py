"""`verbatim rank MODEL`: this machine's part of a model that runs on several."""

from __future__ import annotations

from verbatim.base.setting_rules import host_and_port
from verbatim.cli.lib.command_class import argument, as_command, flag
from verbatim.cli.lib.options import OFFLINE, REVISION


@as_command()
def command(
    model: str = argument(),
    rank_address: str = flag(
        "where rank 0 listens: --rank-address of `verbatim serve` or of another command",
        metavar="HOST:PORT",
        required=True,
    ),
    ranks: int = flag("ranks of this machine, one per GPU", default=1, least=1),
    threads: int | None = flag(
        "threads of each rank on the CPU; default: the physical cores, shared evenly", least=1
    ),
    revision: str | None = REVISION,
    offline: bool = OFFLINE,
) -> None:
    """Join a model that is started with --tensor-parallel and --rank-address on another machine.

    MODEL must be the same file there and here, and so must the version of Verbatim and the variable
    VERBATIM_RANK_SECRET, which proves that a process belongs to the group. Runs until it is
    stopped, and joins again when rank 0 starts again. Use it on a private network: what the ranks
    exchange is not encrypted.
    """
    from verbatim.hub.catalog import resolve
    from verbatim.parallel.machine import run_ranks

    host_and_port("rank_address", rank_address)
    path = resolve(model, revision=revision, offline=offline)
    run_ranks(path.absolute(), rank_address, ranks, threads)
