"""deploy/rayservice.yaml, as far as Ray's wheel has a schema of it: the Serve config inside."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from verbatim import LLM
from verbatim.scale.application import deployment

# Importing Ray Serve warns of its own use of Pydantic.
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
MANIFEST = Path(__file__).parents[2] / "deploy" / "rayservice.yaml"


def test_the_serve_config_of_the_manifest_is_one_that_ray_accepts() -> None:
    import ray
    import yaml
    from ray.serve.schema import ServeDeploySchema

    service, _ = yaml.safe_load_all(MANIFEST.read_text())
    raw = yaml.safe_load(service["spec"]["serveConfigV2"])
    config = ServeDeploySchema.model_validate(raw)
    assert raw.keys() <= ServeDeploySchema.model_fields.keys()  # Ray ignores other keys
    [application] = config.applications
    assert raw["applications"][0].keys() <= type(application).model_fields.keys()
    module, name = application.import_path.split(":")
    assert callable(getattr(__import__(module, fromlist=[name]), name))
    known = inspect.signature(deployment).parameters.keys() | inspect.signature(LLM).parameters
    assert application.args.keys() <= known
    assert service["spec"]["rayClusterConfig"]["rayVersion"] == ray.__version__
