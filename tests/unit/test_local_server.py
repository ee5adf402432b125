"""A child that answers like a server, in place of SGLang: what is started, awaited and ended.

test_ready           arguments, environment and port arrive; waiting is told; the log can be read meanwhile
test_stop            a child of the server, which would outlive it, ends too
test_ends_early      the exit status and the last lines of the log, without the dump of arguments
test_never_ready     the patience is counted, and nothing is left running
test_dies_with_us    a parent that is killed leaves no server behind
"""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from sglang_glm.verification.local_server import LocalServer

PYTHON = sys.executable
STAND_IN = """\
#!{python}
import http.server, os, subprocess, sys, time
words = sys.argv[1:]
print("server_args=" + "x" * 5000, words, os.environ.get("COLOUR"), flush=True)
kind, port = words[words.index("--model-path") + 1], int(words[words.index("--port") + 1])
if kind == "ends":
    sys.exit(print("no such model") or 7)
child = subprocess.Popen(["sleep", "600"])
print("child", child.pid, flush=True)
if kind == "slow":
    time.sleep(600)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        print("asked for", self.path, flush=True)
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "python"
    path.write_text(STAND_IN.format(python=PYTHON))
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))
    return path


def child_of(log: str) -> int:
    (line,) = [line for line in log.splitlines() if line.startswith("child ")]
    return int(line.split()[1])


def gone(pid: int) -> bool:
    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_ready() -> None:
    waited: list[float] = []
    with LocalServer(
        ["--model-path", "m", "--flag"], env={**os.environ, "COLOUR": "blue"}, waiting=waited.append
    ) as server:
        assert server.process.poll() is None and server.url.endswith(f":{server.port}")
        first = server.log.splitlines()[0]
        assert "'sglang.launch_server', '--model-path', 'm', '--flag', '--port'" in first
        assert first.endswith("blue")
        assert waited == sorted(waited) and server.ready_after_s >= (waited or [0])[-1]
        # Reading has not moved where the child writes.
        os.kill(child_of(server.log), 0)
        assert "server_args=" in server.log and "asked for /health" in server.tail(1)
        assert "server_args=" not in server.tail()


def test_stop() -> None:
    with LocalServer(["--model-path", "m"]) as server:
        child = child_of(server.log)
    assert server.process.poll() is not None and gone(child)
    server.stop()


def test_ends_early() -> None:
    with pytest.raises(RuntimeError, match="ended with 7 before it was ready") as told:
        LocalServer(["--model-path", "ends"])
    assert str(told.value).endswith("no such model") and "server_args" not in str(told.value)


def test_never_ready() -> None:
    with pytest.raises(RuntimeError, match=r"not ready after 1\.5 s; its log ends with\n") as told:
        LocalServer(["--model-path", "slow"], ready_timeout_s=1.5)
    assert gone(child_of(str(told.value)))


def test_dies_with_us(stand_in: Path) -> None:
    parent = f"""\
        import sys, time
        sys.executable = {str(stand_in)!r}
        from sglang_glm.verification.local_server import LocalServer
        print(LocalServer(["--model-path", "m"]).process.pid, flush=True)
        time.sleep(600)
    """
    process = subprocess.Popen(
        [PYTHON, "-c", textwrap.dedent(parent)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    server = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert gone(server)
