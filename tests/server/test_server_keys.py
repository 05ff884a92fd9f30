"""The file of API keys: names, limits of each key, and SIGHUP, which reads it again."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from live_server import Live

from eventually import eventually
from verbatim.base.errors import ParameterError
from verbatim.server.admission import Admission
from verbatim.server.auth import Access
from verbatim.server.http.api_keys import ApiKeys, KeyLimits, parse_key, read_keys
from verbatim.server.problem import Problem
from verbatim.server.settings import Limits, Settings

ALICE, BOB, PLAIN = "key-of-alice", "key-of-bob-1", "key-without-name"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("short", "at least 8 printable ASCII characters"),
        ("key-with-ümlaut", "at least 8 printable ASCII characters"),
        (f"{ALICE} alice", "behind a key come name=NAME"),
        (f"{ALICE} name=a/b", "behind a key come name=NAME"),
        (f"{ALICE} max_opne=1", "max_open=N, requests_per_minute=N, tokens_per_minute=N"),
        (f"{ALICE} max_open=0", "limits above 0"),
        (f"{ALICE} max_open=-1", "limits above 0"),
        (f"{ALICE} max_open=1 max_open=2", "each once"),
    ],
)
def test_an_error_names_the_file_and_the_line_but_not_the_key(
    tmp_path: Path, line: str, why: str
) -> None:
    (tmp_path / "keys").write_text(f"{BOB}\n# more\n{line}\n")
    with pytest.raises(ParameterError) as caught:
        read_keys(str(tmp_path / "keys"))
    assert f"{tmp_path}/keys, line 3: " in caught.value.message
    assert why in caught.value.message
    assert line.split()[0] not in caught.value.message


def test_keys_of_one_name_are_one_tenant_with_one_set_of_limits() -> None:
    keys = ApiKeys([f"{ALICE} name=a max_open=2", f"{BOB} max_open=2 name=a", PLAIN])
    assert keys.tenant_of(ALICE.encode()) == keys.tenant_of(BOB.encode()) == "a"
    assert keys.limits_of("a") == KeyLimits(max_open=2)
    assert len(str(keys.tenant_of(PLAIN.encode()))) == 16
    assert keys.tenant_of(b"another-key") is None
    with pytest.raises(ParameterError, match="the keys of the name a have different limits"):
        keys.replace([f"{ALICE} name=a max_open=2", f"{BOB} name=a"])
    assert keys.tenant_of(ALICE.encode()) == "a", "the earlier keys stay"


def test_settings_refuse_a_key_with_an_error() -> None:
    with pytest.raises(ParameterError, match="behind a key come"):
        Settings(keys=(f"{ALICE} nmae=a",))
    assert Access(Settings(keys=(ALICE,)), lambda path: False)._tenant({b"x-api-key": b"x"}) is None
    assert parse_key(ALICE)[2] == KeyLimits()


def refusal(admission: Admission, tenant: str) -> tuple[str, str] | None:
    problem = admission.rejection(tenant)
    assert problem is None or problem.code == "key_overloaded"
    return problem and (problem.headers()["retry-after"], problem.message)


def test_limits_of_a_key() -> None:
    now = 1000.0
    keys = ApiKeys(
        [f"{ALICE} name=a max_open=1", f"{BOB} name=b requests_per_minute=6 tokens_per_minute=60"]
    )
    admission = Admission(Limits(max_per_key=3), keys, lambda: now)
    with admission.admit("a"):
        why = "this key has 1 requests open, which is its limit (max_open)"
        assert refusal(admission, "a") == ("1", why)
        with admission.admit("b"), admission.admit("b"), admission.admit("b"):
            assert refusal(admission, "b") == (
                "1", "this key has 3 requests open, which is its limit"
            )  # fmt: skip
    assert refusal(admission, "a") is None
    for _ in range(3):
        with admission.admit("b"):
            pass
    why = "this key has used its 6 requests per minute (requests_per_minute)"
    assert refusal(admission, "b") == ("10", why)
    with pytest.raises(Problem), admission.admit("b"):
        pass
    now += 10
    with admission.admit("b"):
        admission.spend("b", "tokens_per_minute", 100)
    now += 10
    why = "this key has used its 60 tokens per minute (tokens_per_minute)"
    assert refusal(admission, "b") == ("31", why)
    now += 31
    assert refusal(admission, "b") is None
    admission.spend("a", "tokens_per_minute", 1e9)
    assert refusal(admission, "a") is None, "it has no such limit"


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, Path]]:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"{ALICE} name=alice tokens_per_minute=1\n{PLAIN}\n")
    live = Live("--api-key-file", str(path))
    live.client.headers["authorization"] = f"Bearer {PLAIN}"
    yield live.wait_ready(), path
    assert live.stop() == 0


def ask(live: Live, key: str) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return live.post("/v1/completions", {"prompt": "hi", "max_tokens": 2}, headers=headers)


@pytest.mark.server
def test_names_are_in_the_log_and_the_metrics_and_limits_hold(named: tuple[Live, Path]) -> None:
    live, _ = named
    used = ask(live, ALICE).json()["usage"]
    refused = ask(live, ALICE)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "key_overloaded")
    assert int(refused.headers["retry-after"]) > 60
    assert "tokens_per_minute" in refused.text
    assert ask(live, PLAIN).status_code == 200
    found = live.metrics()
    assert found['verbatim_key_answers_total{key="alice",status="200"}'] == 1
    assert found['verbatim_key_answers_total{key="alice",status="429"}'] == 1
    tokens = found['verbatim_key_tokens_total{key="alice",kind="prompt"}']
    assert tokens == used["prompt_tokens"]
    eventually(lambda: "tenant=alice" in live.log_text(), live.log_text)
    assert ALICE not in live.log_text()


@pytest.mark.server
def test_sighup_reads_the_keys_again(named: tuple[Live, Path]) -> None:
    live, path = named

    def hang_up(said: str) -> None:
        live.process.send_signal(signal.SIGHUP)
        eventually(lambda: said in live.log_text(), live.log_text)

    path.write_text(f"{PLAIN}\n{BOB} name=bob\n")
    assert ask(live, BOB).status_code == 401
    hang_up("SIGHUP: 2 keys read again")
    assert [ask(live, key).status_code for key in (BOB, PLAIN, ALICE)] == [200, 200, 401]
    path.write_text(f"{PLAIN}\n{ALICE} name=\n")
    hang_up(f"SIGHUP: the keys stay as they were: api_key_file: {path}, line 2: behind a key")
    path.unlink()
    hang_up("cannot be read as text")
    assert [ask(live, key).status_code for key in (BOB, PLAIN, ALICE)] == [200, 200, 401]
    assert live.client.get("/health").status_code == 200
