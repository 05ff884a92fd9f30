"""`verbatim rank MODEL`: this machine's part of a model that runs on several."""

from __future__ import annotations

import logging
import os
import sys

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
    threads: int | None = flag("threads on the CPU; default: the physical cores", least=1),
    revision: str | None = REVISION,
    offline: bool = OFFLINE,
) -> None:
    """Be one rank of a model that another machine starts with --tensor-parallel or
    --pipeline-parallel, and --rank-address. One command per rank; on GPUs one per card.

    MODEL must be the same file there and here, and so must the version of Verbatim and the variable
    VERBATIM_RANK_SECRET, which proves that a process belongs to the group. Runs until it is
    stopped, and joins again when rank 0 starts again. Use it on a private network: what the ranks
    exchange is not encrypted.
    """
    from verbatim.hub.catalog import resolve
    from verbatim.parallel.rank_process import join_group

    host_and_port("rank_address", rank_address)
    path = resolve(model, revision=revision, offline=offline)
    logging.basicConfig(
        level=os.environ.get("VERBATIM_LOG", "INFO"), format="verbatim: %(message)s"
    )
    join_group(path.absolute(), rank_address, threads)
    # the next group gets a process without anything of this one
    os.execv(sys.executable, [sys.executable, "-m", "verbatim", *sys.argv[1:]])
