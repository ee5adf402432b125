"""What the recipes share: arguments, HTTP, and an exit status.

A recipe's docstring says what it needs, how to run it and what to expect; `--help` prints it.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING, Any

import requests

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT_S = 600


class Failure(Exception):
    """The recipe did not see what it expects; the message is the reason."""


def parser(
    doc: str | None, *, url: str | None = "http://127.0.0.1:30000"
) -> argparse.ArgumentParser:
    """A parser that prints the recipe's docstring; `url=None` leaves `--url` to the recipe."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if url is not None:
        made.add_argument("--url", default=url, help=f"the server (default {url})")
    return made


def run(main: Any) -> None:
    """End with 0, or with 1 and the reason."""
    try:
        main()
    except requests.ConnectionError as error:
        address = error.request.url if error.request is not None else "the server"
        raise SystemExit(
            f"failed: {address} does not answer; start the server (make serve), or give --url"
        ) from None
    except (Failure, requests.RequestException) as error:
        raise SystemExit(f"failed: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit("interrupted") from None


def expect(condition: object, reason: str) -> None:
    """Fail with a reason unless a condition holds."""
    if not condition:
        raise Failure(reason)


def get(url: str, path: str) -> requests.Response:
    """GET a page that must be there."""
    response = requests.get(f"{url}{path}", timeout=TIMEOUT_S)
    expect(response.ok, f"{path} answered {response.status_code}: {response.text[:300]}")
    return response


def post(url: str, path: str, **body: Any) -> dict[str, Any]:
    """POST JSON and read JSON."""
    response = requests.post(f"{url}{path}", json=body, timeout=TIMEOUT_S)
    expect(response.ok, f"{path} answered {response.status_code}: {response.text[:300]}")
    return response.json()


def flush_cache(url: str) -> None:
    """Forget every cached prefix; the server must be idle."""
    response = requests.post(f"{url}/flush_cache", timeout=TIMEOUT_S)
    expect(response.ok, f"/flush_cache answered {response.status_code}: other requests run")


def chat(url: str, messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """One `/v1/chat/completions` answer, greedy unless told otherwise."""
    body = {"model": "default", "messages": messages, "temperature": 0, "max_tokens": 64, **options}
    return post(url, "/v1/chat/completions", **body)


def user(text: str) -> list[dict[str, Any]]:
    """A conversation of one message."""
    return [{"role": "user", "content": text}]


def stream(url: str, messages: list[dict[str, Any]], **options: Any) -> Iterator[dict[str, Any]]:
    """The deltas of a streamed answer, as they arrive."""
    body = {"model": "default", "messages": messages, "temperature": 0, "stream": True, **options}
    with requests.post(
        f"{url}/v1/chat/completions", json=body, stream=True, timeout=TIMEOUT_S
    ) as response:
        expect(response.ok, f"answered {response.status_code}")
        for line in response.iter_lines():
            if line == b"data: [DONE]":
                return
            if line.startswith(b"data: "):
                choices = json.loads(line[6:])["choices"]
                if choices:
                    yield choices[0]["delta"]
    raise Failure("the stream ended without [DONE]")


def generate(url: str, new_tokens: int, **body: Any) -> tuple[dict[str, Any], float]:
    """One greedy `/generate` answer and the seconds it took."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    started = time.monotonic()
    answer = post(url, "/generate", sampling_params=sampling, **body)
    return answer, time.monotonic() - started
