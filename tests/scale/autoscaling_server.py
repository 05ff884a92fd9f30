"""`verbatim serve --ray ADDRESS --replicas 1-2` that adds and removes replicas without delay:
`autoscaling_server.py ADDRESS GATE`. Its engines make as many steps as the file GATE allows."""

from __future__ import annotations

import os
import sys

from verbatim.scale.deploy import serve_on_ray
from verbatim.scale.ray_options import RayOptions, Replicas
from verbatim.server.settings import Settings

address, gate = sys.argv[1:]
settings = Settings(
    model="m",
    served_names=("m",),
    port=0,
    test_engine=f"pipeline,gate={gate}",
    engine={"threads": 1},
    keys=(os.environ["VERBATIM_API_KEY"],),
    engine_silence_seconds=1e9,  # an engine without a step is not dead here
    drain_seconds=1e6,
)
options = RayOptions(
    address, Replicas(1, 2), target_requests=2, upscale_seconds=0.0, downscale_seconds=0.0
)
sys.exit(serve_on_ray(settings, options))
