"""What a user of the HTTP endpoints does, and what is left in the pool afterwards.

test_chat, test_streaming       plain answers; the stream says what the whole answer says
test_tool_call                  a tool call in GLM's format comes back as `tool_calls`
test_reasoning                  thinking on and off
test_anthropic                  /v1/messages
test_json_schema                constrained output
test_too_long                   400 with both numbers
test_bad_requests               what would end the scheduler gets a 400, and the server serves on
test_session                    a request that replaces all of a session before it
test_empty_grammar              a grammar without any text ends its request alone
test_bad_control_requests       so do the endpoints that record and profile
test_bad_tensors                nor do weights that cannot be unpacked end it
test_release_and_resume         of memory, as a trainer asks for it between two rollouts, once and in vain
test_busy_release               memory of requests that are being served is not released
test_profile                    a profile of one batch is written, and another after it; never two at a time
test_disconnect                 a client that leaves takes its request with it
test_abort_mid_prefill          abort between chunks: nothing is cached of it, every page returns
test_metrics                    tokens are counted
"""

import json
import threading
import time
from pathlib import Path

import pytest
import requests

from tests.support.parity import prompt
from tests.support.server import Server
from tests.support.specs import TRUTH_8, TRUTH_64

SERVER = TRUTH_64

NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(autouse=True)
def _pages_return(server: Server):
    """After each test the pool is as empty as before it."""
    yield
    server.wait_idle()
    server.flush_cache()


def chat(server: Server, text: str = "Hello", **options: object) -> requests.Response:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 24,
    }
    return server.post("/v1/chat/completions", **{**body, **options})


def test_chat(server: Server) -> None:
    answer = chat(server, **NO_THINKING).json()
    assert answer["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens"] <= 24
    longer = chat(server, "Hello " * 40, **NO_THINKING).json()
    assert longer["usage"]["prompt_tokens"] > answer["usage"]["prompt_tokens"]


def test_streaming(server: Server) -> None:
    whole = chat(server, **NO_THINKING).json()["choices"][0]["message"]["content"]
    response = requests.post(
        f"{server.url}/v1/chat/completions",
        json={
            "model": "m",
            "messages": [{"role": "user", "content": "Hello"}],
            "temperature": 0,
            "max_tokens": 24,
            "stream": True,
            **NO_THINKING,
        },
        stream=True,
        timeout=120,
    )
    events = [line[6:] for line in response.iter_lines() if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]"
    deltas = [
        json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events[:-1]
    ]
    assert "".join(deltas) == whole
    assert sum(bool(delta) for delta in deltas) > 3


def test_tool_call(server: Server) -> None:
    call = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>"
    answer = chat(
        server, "Weather in Paris?", tools=[WEATHER], regex=call, max_tokens=200, **NO_THINKING
    ).json()
    message = answer["choices"][0]["message"]
    assert [c["function"]["name"] for c in message["tool_calls"]] == ["get_weather"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris"}
    without = chat(server, "Weather in Paris?", **NO_THINKING).json()
    assert answer["usage"]["prompt_tokens"] > without["usage"]["prompt_tokens"] + 20


def test_reasoning(server: Server) -> None:
    thinking = chat(server).json()["choices"][0]["message"]
    assert thinking["reasoning_content"] and not thinking["content"]
    plain = chat(server, **NO_THINKING).json()["choices"][0]["message"]
    assert plain["content"] and not plain["reasoning_content"]


def test_anthropic(server: Server) -> None:
    answer = server.post(
        "/v1/messages", model="m", max_tokens=8, messages=[{"role": "user", "content": "Hi"}]
    ).json()
    assert answer["type"] == "message" and answer["usage"]["output_tokens"] == 8


def test_json_schema(server: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Oslo"]}},
        "required": ["city"],
    }
    answer = chat(
        server,
        max_tokens=100,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        **NO_THINKING,
    ).json()
    assert json.loads(answer["choices"][0]["message"]["content"])["city"] in ("Paris", "Oslo")


def test_too_long(server: Server) -> None:
    response = server.post(
        "/generate", input_ids=[5] * 33000, sampling_params={"max_new_tokens": 1}
    )
    assert response.status_code == 400
    assert "33000" in response.text and "32768" in response.text
    response = chat(server, max_tokens=40000)
    assert response.status_code == 400
    assert "32768" in response.text and "40000" in response.text


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/generate", {"text": ""}, "0 tokens"),
        ("/generate", {"input_ids": [[5, 6], [5, 2**20]]}, "input_ids[1] is 1048576"),
        ("/generate", {"input_ids": [-1, 5]}, "input_ids[0] is -1"),
        (
            "/generate",
            {"input_ids": [5, 6], "return_logprob": True, "logprob_start_len": -2},
            "logprob_start_len is -2",
        ),
        (
            "/v1/completions",
            {"model": "m", "prompt": "Hello", "logprobs": 2**20},
            "top_logprobs_num is 1048576",
        ),
        (
            "/generate",
            {"input_ids": [5], "sampling_params": {"stop_regex": "("}},
            "stop_regex is '(', expected",
        ),
        ("/v1/completions", {"model": "m", "prompt": [5, 2**20]}, "input_ids[1] is 1048576"),
        (
            "/generate",
            {"input_ids": [5], "sampling_params": {"top_k": 2**31}},
            "top_k is 2147483648",
        ),
        ("/generate", {"input_ids": [5], "sampling_params": {"n": 2**40}}, "n is 1099511627776"),
        ("/v1/completions", {"model": "m", "prompt": "a", "n": 2**40}, "n is 1099511627776"),
        (
            "/generate",
            {"input_ids": [5], "sampling_params": {"min_new_tokens": 2, "stop_token_ids": [2**20]}},
            "stop_token_ids has 1048576",
        ),
        (
            "/generate",
            {"input_ids": [5], "sampling_params": {"logit_bias": {"5": 1e39}}},
            "logit_bias of 5 is 1e+39",
        ),
        (
            "/generate",
            {"input_ids": [5], "session_params": {"id": ["s"]}},
            "session_params.id is ['s'], expected str",
        ),
        (
            "/generate",
            {"input_ids": [5], "positional_embed_overrides": {}},
            "positional_embed_overrides is a dict",
        ),
        ("/generate", {"input_ids": [5], "custom_labels": {"a": "b"}}, "custom_labels has 'a'"),
        (
            "/generate",
            {"input_ids": [5], "token_indices_to_pool": [9]},
            "token_indices_to_pool has 9",
        ),
        (
            "/generate",
            {"input_ids": [5], "sampling_params": {"stop_regex": "(x+x+)+y"}},
            "repeats what consists of repeats",
        ),
    ],
)
def test_bad_requests(server: Server, path: str, body: dict, said: str) -> None:
    response = server.post(path, **body)
    assert response.status_code == 400 and said in response.text
    assert len(server.generate([5, 6])["output_ids"]) == 8


@pytest.mark.parametrize(
    "grammar", [{"ebnf": "root ::= root"}, {"json_schema": '{"$ref": "#"}'}], ids=["ebnf", "schema"]
)
@pytest.mark.parametrize("temperature", [0, 1])
def test_empty_grammar(server: Server, grammar: dict, temperature: int) -> None:
    params = {"max_new_tokens": 4, "temperature": temperature, **grammar}
    response = server.post("/generate", input_ids=[5, 6], sampling_params=params)
    assert response.status_code != 200 and "rammar" in response.text
    assert len(server.generate([5, 6])["output_ids"]) == 8


def test_session(server: Server) -> None:
    assert server.post("/open_session", capacity_of_str_len=100, session_id="s").status_code == 200
    prompts = []
    for rid, params in (("a", {}), ("b", {"rid": "a"}), ("c", {"replace": True})):
        answer = server.post(
            "/generate",
            rid=rid,
            input_ids=[5, 6],
            session_params={"id": "s", **params},
            sampling_params={"max_new_tokens": 1},
        )
        prompts.append(answer.json()["meta_info"]["prompt_tokens"])
    assert prompts == [2, 2 + 1 + 2, 2]
    server.post("/close_session", session_id="s")


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        *(
            (f"/{step}_expert_distribution_record", {}, "--expert-distribution-recorder-mode")
            for step in ("start", "stop", "dump")
        ),
        ("/start_profile", {"activities": ["MEM"]}, "'MEM', which needs an NVIDIA GPU"),
        ("/start_profile", {"activities": ["CUDA_PROFILER"]}, "'CUDA_PROFILER', which needs"),
        ("/start_profile", {"profile_by_stage": True}, "give num_steps"),
        ("/start_profile", {"profile_prefix": "a/b"}, "part of a file name"),
        ("/start_profile", {"output_dir": "/proc/traces"}, "cannot be made"),
        ("/stop_profile", {}, "not in progress"),
        (
            "/update_weights_from_disk",
            {"model_path": TRUTH_8.model},
            "index_topk of",
        ),
        (
            "/send_weights_to_remote_instance",
            {"master_address": "127.0.0.1", "ports": "1"},
            "KeyError",
        ),
        (
            "/init_weights_send_group_for_remote_instance",
            {"master_address": "127.0.0.1", "ports": "1,2", "group_rank": 0, "world_size": 1},
            "Expected 1 ports",
        ),
        ("/configure_logging", {"log_requests_level": 99}, "log_requests_level is 99"),
        ("/configure_logging", {"log_level": "bogus"}, "log_level is 'bogus'"),
        ("/update_weights_from_disk", {"model_path": "/nowhere"}, "Failed to get weights iterator"),
    ],
)
def test_bad_control_requests(server: Server, path: str, body: dict, said: str) -> None:
    response = server.post(path, **body)
    assert response.status_code == 400 and said in response.text
    assert len(server.generate([5, 6])["output_ids"]) == 8


@pytest.mark.parametrize("payload", [[], ["AAAA"]])
def test_bad_tensors(server: Server, payload: list[str]) -> None:
    assert server.post("/begin_weight_update").status_code == 200
    response = server.post("/update_weights_from_tensor", serialized_named_tensors=payload)
    assert response.status_code == 400 and "were not loaded" in response.text
    assert server.post("/end_weight_update").status_code == 200
    assert len(server.generate([5, 6])["output_ids"]) == 8


def test_release_and_resume(server: Server) -> None:
    ids = prompt(server, 100, seed=4)
    before = server.generate(ids)["output_ids"]
    server.wait_idle()
    resume, release = "/resume_memory_occupation", "/release_memory_occupation"
    for path in (resume, release, release, resume, resume):
        assert server.post(path).status_code == 200
    assert server.generate(ids)["output_ids"] == before


def test_busy_release(server: Server) -> None:
    with stream(server) as response:
        next(response.iter_lines())
        refused = server.post("/release_memory_occupation")
        assert refused.status_code == 400 and "1 requests are being served" in refused.text
    server.wait_idle()


def test_profile(server: Server, tmp_path: Path) -> None:
    for folder in (tmp_path / "first", tmp_path / "second"):
        started = server.post("/start_profile", output_dir=str(folder), num_steps=4)
        assert started.status_code == 200, started.text
        again = server.post("/start_profile", output_dir=str(tmp_path / "never"))
        assert again.status_code == 400 and "/stop_profile first" in again.text
        server.generate(prompt(server, 20, seed=5))
        assert any(folder.rglob("*.trace.json.gz"))


def stream(server: Server) -> requests.Response:
    """A long answer, as it comes."""
    return requests.post(
        f"{server.url}/generate",
        json={
            "input_ids": prompt(server, 200, seed=1),
            "sampling_params": {"max_new_tokens": 5000, "ignore_eos": True},
            "stream": True,
        },
        stream=True,
        timeout=60,
    )


def test_disconnect(server: Server) -> None:
    with stream(server) as response:
        next(response.iter_lines())
        assert server.load()["num_running_reqs"] == 1
    server.wait_idle()


@pytest.mark.parametrize("wait_s", [0.0, 0.15, 0.4, 0.8])
def test_abort_mid_prefill(server: Server, wait_s: float) -> None:
    ids = prompt(server, 4000, seed=2)
    outcome = {}

    def send() -> None:
        outcome["answer"] = server.post(
            "/generate",
            rid="aborted",
            input_ids=ids,
            sampling_params={"max_new_tokens": 2000, "ignore_eos": True},
        )

    sender = threading.Thread(target=send)
    sender.start()
    while not any(
        server.load()[key] for key in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")
    ):
        time.sleep(0.02)
    time.sleep(wait_s)
    server.post("/abort_request", rid="aborted")
    sender.join(60)
    assert not sender.is_alive()
    assert outcome["answer"].json()["meta_info"]["finish_reason"]["type"] == "abort"
    server.wait_idle()
    # The pool serves as before, and what was computed of the aborted prompt is right if it is used.
    server.flush_cache()
    cold = server.generate(ids[:300])["output_ids"]
    assert server.generate(ids[:300])["output_ids"] == cold


def test_metrics(server: Server) -> None:
    def generated() -> float:
        text = requests.get(f"{server.url}/metrics", timeout=30).text
        lines = [
            line for line in text.splitlines() if line.startswith("sglang:generation_tokens_total")
        ]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    before = generated()
    server.generate(prompt(server, 20, seed=3), max_new_tokens=7)
    assert generated() == before + 7
