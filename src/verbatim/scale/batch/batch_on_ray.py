"""`verbatim batch --ray`: the requests of a batch on the actors of Ray Data.

Requests come in; write() gets each answer exactly once, in the order of the requests. This process
is the only writer: an actor's batch arrives here whole or not at all, so a batch that ran twice
because its actor died leaves no trace. A batch is BATCH_FACTOR times the concurrency: long enough
to keep an engine full, short enough that a dead actor costs little.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace

from verbatim.base.errors import ModelError
from verbatim.scale.batch.batch_actor import AnswerRequests
from verbatim.scale.ray_options import RayOptions
from verbatim.scale.ray_start import UNPROTECTED, cluster_nodes, connect, has_token_authentication
from verbatim.scale.replicas import check_files
from verbatim.scale.resources import state_needs
from verbatim.scale.start_error import reason_in
from verbatim.server.batch_requests import Line
from verbatim.server.settings import Settings

log = logging.getLogger("verbatim.scale")
BATCH_FACTOR = 2
# Batches in an actor at once: while one drains to its last, longest answers, the next fills up.
IN_FLIGHT = 2


def answer_on_ray(
    settings: Settings,
    options: RayOptions,
    todo: list[Line],
    concurrency: int,
    write: Callable[[Line], None],
) -> None:
    footprint = check_files(settings, options)
    started = connect(options.address)
    if not has_token_authentication():  # then the cluster has accepted a call without a token
        log.warning(UNPROTECTED)
    import ray
    import ray.data
    import ray.exceptions

    try:
        needs = state_needs(footprint, settings.engine, cluster_nodes(), options.replicas)
        limits = replace(settings.limits, max_queue=IN_FLIGHT * concurrency)
        engine = {**settings.engine, **needs.settings}
        actor_settings = replace(settings, engine=engine, limits=limits)
        context = ray.data.DataContext.get_current()
        context.execution_options.preserve_order = True
        context.enable_progress_bars = False  # the command has its own
        context.print_on_execution_start = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        rows = min(BATCH_FACTOR * concurrency, max(len(todo) // options.replicas.most, 1))
        requests = ray.data.from_items(
            [{"request": json.dumps(line)} for line in todo],
            override_num_blocks=-(-len(todo) // rows),
        )
        answers = requests.map_batches(
            AnswerRequests,
            batch_size=None,  # one block is one batch: what Ray runs again when an actor dies
            fn_constructor_args=(actor_settings, concurrency, bool(needs.gpus)),
            compute=ray.data.ActorPoolStrategy(
                min_size=options.replicas.least,
                max_size=options.replicas.most,
                max_tasks_in_flight_per_actor=IN_FLIGHT,
                max_concurrent_calls_per_actor=IN_FLIGHT,
                enable_true_multi_threading=True,  # two batches overlap in one actor
            ),
            # Ray Data restarts a dead actor and runs its batches again without limit. A request
            # that kills its engine is answered with an error by the supervisor, so no batch does
            # it for ever.
            num_cpus=needs.cpus,
            num_gpus=needs.gpus,
            memory=needs.memory,
        )
        for row in answers.iter_rows():
            write(json.loads(row["answer"]))
    except ray.exceptions.RayError as error:
        if reason := reason_in(str(error)):
            raise ModelError(reason) from None
        raise
    finally:
        if started:
            ray.shutdown()
