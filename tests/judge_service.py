"""A small OpenAI-compatible service that answers, and misbehaves, as a test tells it."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def completion(text: str | None, prompt_tokens: int = 10, completion_tokens: int = 4) -> dict[str, Any]:
    """A reply as the service gives it."""
    return {
        "choices": [{"message": {"role": "assistant", "content": text}}],
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens},
    }


@dataclass
class Asked:
    """A request that came."""

    body: dict[str, Any]
    path: str
    key: str
    at: float


@dataclass
class Service:
    """What came, and what is done with it.

    Args:
        url: of the service.
        act: does something with the handler for the n-th request; true if it has answered.
        text: of ordinary replies, by the request's body.
    """

    url: str
    act: Callable[[BaseHTTPRequestHandler, int], bool] = lambda handler, number: False
    text: Callable[[dict[str, Any]], str] = lambda body: "Score: 5"
    asked: list[Asked] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


def answer(handler: BaseHTTPRequestHandler, status: int, data: bytes, **headers: str) -> bool:
    """Send a whole answer."""
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)
    return True


@contextmanager
def judge_service() -> Iterator[Service]:
    """A service on this machine, in threads of this process."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:  # noqa: N802  (the name that http.server calls)
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with service.lock:
                number = len(service.asked)
                key = self.headers.get("Authorization", "")
                service.asked.append(Asked(body, self.path, key, time.monotonic()))
                service.at_once += 1
                service.most_at_once = max(service.most_at_once, service.at_once)
            try:
                if not service.act(self, number):
                    answer(self, 200, json.dumps(completion(service.text(body))).encode())
            except OSError:
                self.close_connection = True
            finally:
                with service.lock:
                    service.at_once -= 1

        def log_message(self, *args: Any) -> None:
            """Nothing is written."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    service = Service(f"http://127.0.0.1:{server.server_port}/v1")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
