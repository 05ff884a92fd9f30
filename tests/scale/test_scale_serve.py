"""`verbatim serve --ray` over a fake Ray Serve: what it refuses, warns about and reports."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from replicas_without_ray import settings_of

from verbatim.scale import deploy
from verbatim.scale.deploy import OwnService
from verbatim.scale.ray_options import RayOptions
from verbatim.scale.resources import Node

pytestmark = pytest.mark.server


class FakeServe:
    """`failure`: what a replica's constructor raised, as Serve reports it; empty: it started."""

    def __init__(self, authenticated: bool = True, failure: str = "") -> None:
        self.authenticated = authenticated
        self.failure = failure
        self.deleted: list[str] = []

    def start(self, **options: Any) -> None:
        pass

    def run(self, application: Any, *, name: str, **options: Any) -> Any:
        if self.failure:
            raise RuntimeError("Deploying application failed: Failed to update ['engine'].")
        answer = SimpleNamespace(result=lambda: self.authenticated)
        return SimpleNamespace(has_token_authentication=SimpleNamespace(remote=lambda: answer))

    def delete(self, name: str) -> None:
        self.deleted.append(name)


@pytest.fixture
def on_fake_serve(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the service of a joined cluster with this Serve."""

    def make(serve: FakeServe) -> OwnService:
        ray: Any = ModuleType("ray")
        ray.serve = serve
        monkeypatch.setitem(sys.modules, "ray", ray)
        monkeypatch.setattr(deploy, "connect", lambda address: False)
        monkeypatch.setattr(deploy, "cluster_nodes", lambda: [Node(8.0, 0.0, 64 << 30)])
        monkeypatch.setattr(deploy, "replicas_application", lambda *args: None)
        monkeypatch.setattr(deploy, "quiet_serve", lambda: None)
        return OwnService(settings_of(), RayOptions("10.0.0.1:6379"))

    return make


@pytest.mark.parametrize("authenticated", [True, False])
def test_a_cluster_without_token_authentication_is_joined_with_a_warning(
    on_fake_serve: Any, authenticated: bool, caplog: pytest.LogCaptureFixture
) -> None:
    on_fake_serve(FakeServe(authenticated)).start()
    assert ("no token authentication" in caplog.text) is not authenticated
