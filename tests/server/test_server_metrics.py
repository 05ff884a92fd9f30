"""GET /metrics: the metrics of the HTTP process, then those of the engine, in Prometheus format."""

from __future__ import annotations

from live_server import Live
from prometheus_client.parser import text_string_to_metric_families

import verbatim
from verbatim.base.records import Usage
from verbatim.server.http_metrics import Metrics
from verbatim.server.process.ledger import Ledger
from verbatim.server.process.supervisor import Supervisor
from verbatim.server.settings import Settings


def scrape(text: str) -> dict[tuple[str, ...], float]:
    families = list(text_string_to_metric_families(text))
    return {
        (s.name, *(v for _, v in sorted(s.labels.items()))): s.value
        for f in families
        for s in f.samples
    }


async def test_open_requests_that_do_not_run_count_as_waiting() -> None:
    """Three requests are open. The engine reports one as running; the others wait."""
    metrics, ledger = Metrics(), Ledger()
    for name in "abcd":
        ledger.open(name)
    ledger.close("d", "stop", Usage(3, 2, 1, 0, 0))
    metrics.answered("/v1/models", 200)
    metrics.answered("/v1/models", 200)
    engine = Supervisor(Settings())
    engine.ledger, engine.stats = ledger, {"requests_running": 1}
    refused = "verbatim_requests_refused_total"
    engine.metrics = (
        f"# TYPE verbatim_x gauge\nverbatim_x 1\n# TYPE {refused} counter\n{refused} 4\n"
    )
    engine.restarts = 2
    engine._running = dict.fromkeys("abc")  # type: ignore[arg-type]
    found = scrape(metrics.text({"m": engine}, 5, 2, refused=3))
    assert found[(refused,)] == 7
    assert found[("verbatim_requests_open",)] == 3
    assert found[("verbatim_requests_waiting",)] == 2
    assert found[("verbatim_requests_opened_total",)] == 4
    assert found[("verbatim_requests_ended_total", "stop")] == 1
    assert found[("verbatim_usage_tokens_total", "output")] == 2
    assert found[("verbatim_http_open_requests",)] == 5
    assert found[("verbatim_http_unfinished_bodies",)] == 2
    assert found[("verbatim_http_answers_total", "/v1/models", "200")] == 2
    assert found[("verbatim_engine_restarts_total",)] == 2
    assert found[("verbatim_engine_up",)] == 0
    assert found[("verbatim_x",)] == 1
    ledger.close("a", "stop")
    ledger.close("b", "stop")
    ledger.close("c", "stop")
    engine._running.clear()  # before the next heartbeat
    assert scrape(metrics.text({"m": engine}, 5, 2))[("verbatim_requests_waiting",)] == 0


def test_metrics_of_a_live_server_parse(fake: Live) -> None:
    answer = fake.client.get("/metrics")
    while "verbatim_steps_total" not in answer.text:  # the engine's first heartbeat
        answer = fake.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = list(text_string_to_metric_families(answer.text))
    kinds = {s.name: f.type for f in families for s in f.samples}
    assert all((kind == "counter") == name.endswith("_total") for name, kind in kinds.items())
    names = (
        "verbatim_requests_running",
        "verbatim_requests_waiting",
        "verbatim_kv_cache_usage_ratio",
    )
    assert {kinds[name] for name in names} == {"gauge"}
    (build,) = [f for f in families if f.name == "verbatim_build_info"]
    assert build.samples[0].labels["version"] == verbatim.__version__
