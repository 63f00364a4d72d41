"""A Hub on this machine: the few routes that huggingface_hub calls, over a folder, with a note of every byte sent."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """`sent` counts body bytes by file; `ranges` says whether Range headers are honoured."""

    folder: Path
    repo: str = "owner/name"
    ranges: bool = True
    url: str = ""
    sent: dict[str, int] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """Run it on a free port of the loopback interface."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = self.path.split("?")[0]
        self.hub.asked.append(f"{self.command} {path}")
        if re.fullmatch(rf"/api/models/{self.hub.repo}(/revision/[^/]+)?", path):
            files = sorted(item.name for item in self.hub.folder.iterdir() if item.is_file())
            info = {"_id": "1", "id": self.hub.repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            self.send(200, json.dumps(info).encode(), {"Content-Type": "application/json"}, body, None)
            return
        found = re.fullmatch(rf"/{self.hub.repo}/resolve/{COMMIT}/([^/]+)", path)
        file = self.hub.folder / found[1] if found else None
        if file is None or not file.is_file():
            self.send(404, b"", {"X-Error-Code": "RepoNotFound"}, body, None)
            return
        self.send_file(file, body)

    def send_file(self, file: Path, body: bool) -> None:
        data = file.read_bytes()
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if wanted is None or not self.hub.ranges:
            self.send(200, data, headers, body, file.name)
            return
        start, stop = int(wanted[1]), min(int(wanted[2]) + 1, len(data))
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        self.send(206, data[start:stop], headers, body, file.name)

    def send(self, status: int, data: bytes, headers: dict[str, str], body: bool, name: str | None) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            try:
                self.wfile.write(data)
            except (BrokenPipeError, ConnectionResetError):  # the client left early, as it should
                return
            if name is not None:
                self.hub.sent[name] = self.hub.sent.get(name, 0) + len(data)
