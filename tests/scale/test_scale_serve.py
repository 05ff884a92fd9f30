"""`verbatim serve --ray` over a fake Ray Serve: what it refuses, warns about and reports."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from replicas_without_ray import settings_of

from eventually import HANG_SECONDS
from verbatim.base.errors import ModelError
from verbatim.scale import deploy, replicas
from verbatim.scale.deploy import OwnService
from verbatim.scale.ray_options import RayOptions
from verbatim.scale.resources import Node
from verbatim.scale.start_error import did_not_start

pytestmark = pytest.mark.server


class FakeServe:
    """The calls of Ray Serve that the command makes. `report`: what Serve says of a replica."""

    def __init__(
        self, authenticated: bool = True, status: str = "RUNNING", report: str = ""
    ) -> None:
        self.authenticated = authenticated
        engine = SimpleNamespace(message=report, replica_states={"STARTING": 1})
        self.app = SimpleNamespace(status=status, message="Failed.", deployments={"engine": engine})
        self.polled = threading.Event()
        self.deleted: list[str] = []

    def start(self, **options: Any) -> None:
        pass

    RunTarget = staticmethod(lambda application, *, name, **options: name)

    def run_many(self, targets: list[str], wait_for_applications_running: bool) -> list[Any]:
        assert not wait_for_applications_running
        self.applications = dict.fromkeys(targets, self.app)
        answer = SimpleNamespace(result=lambda: self.authenticated)
        return [SimpleNamespace(has_token_authentication=SimpleNamespace(remote=lambda: answer))]

    def status(self) -> Any:
        self.polled.set()
        return self

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


# Ray Serve 2.60's report of a constructor that raised, shortened.
REPORT = """A replica failed to start with exception. Retrying 2 more time(s). Error:
ray::ServeReplica:verbatim-8000:engine.initialize() (pid=1, ip=127.0.0.1)
  File "ray/serve/_private/replica.py", line 1928, in initialize
    raise RuntimeError(traceback.format_exc()) from None
RuntimeError: Traceback (most recent call last):
  File "verbatim/scale/replica.py", line 52, in __init__
    raise did_not_start(self._supervisor.fatal.result())
RuntimeError: """


@pytest.mark.parametrize("status", ["DEPLOYING", "DEPLOY_FAILED"])
def test_a_failed_start_names_the_engines_own_error(on_fake_serve: Any, status: str) -> None:
    reason = 'adapters: no such adapter "x\\y"\nin two lines'
    report = f"{REPORT}{did_not_start(reason)}\n"
    with pytest.raises(ModelError) as failed:
        on_fake_serve(FakeServe(status=status, report=report)).start()
    assert str(failed.value) == reason


def test_a_replica_that_dies_without_an_error_of_ours_is_reported_too(on_fake_serve: Any) -> None:
    report = "A replica failed to start. Error:\nThe actor died unexpectedly.\n"
    with pytest.raises(ModelError, match=r"did not start: Failed. The actor died unexpectedly."):
        on_fake_serve(FakeServe(status="DEPLOY_FAILED", report=report)).start()


def test_a_missing_file_is_an_error_before_ray_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(deploy, "connect", lambda address: pytest.fail("Ray was started"))
    gone = replace(settings_of(), test_engine="", model=str(tmp_path / "gone.gguf"))
    with pytest.raises(ModelError, match=r"gone\.gguf"):
        OwnService(gone, RayOptions())
    monkeypatch.setattr(replicas, "footprint_of", lambda settings: object())
    adapted = replace(gone, engine={"adapters": (f"a={tmp_path}/none",)})
    with pytest.raises(ModelError, match="no such adapter"):
        OwnService(adapted, RayOptions())


def test_a_stop_while_the_replicas_load_does_not_wait_for_them(on_fake_serve: Any) -> None:
    serve = FakeServe(status="DEPLOYING")
    service = on_fake_serve(serve)
    starting = threading.Thread(target=service.start)
    starting.start()
    assert serve.polled.wait(HANG_SECONDS)
    assert service.progress() == "1 starting"
    service.stop()
    starting.join(HANG_SECONDS)
    assert not starting.is_alive()
    assert serve.deleted == [service.application]


def test_a_stop_does_not_wait_for_a_cluster_that_is_gone(
    on_fake_serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve, answered = FakeServe(), threading.Event()
    service = on_fake_serve(serve)
    service.start()
    serve.delete = lambda name: answered.wait()  # type: ignore[method-assign,assignment,return-value]
    monkeypatch.setattr(deploy, "DELETE_SECONDS", 0.01)
    service.settings = replace(service.settings, drain_seconds=0.0)
    service.stop()
    assert not answered.is_set()
    answered.set()
