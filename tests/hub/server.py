"""A Hub on this machine that speaks the Hub's own protocol: the unmodified client reads and writes through it.

Routes: create, branch, info, tree (paged), preupload, LFS batch with basic and multipart transfer, commit, resolve.
"""

import hashlib
import json
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.hub.faults import Faults, Kind
from tests.hub.store import Repo, Store, Stored, is_large
from tests.loopback import listening

PART_BYTES = 3000
PAGE = 5
SILENCE_SECONDS = 0.8  # longer than a client of the tests waits
Answer = tuple[int, Any, Mapping[str, str]]


@dataclass
class Hub:
    """`token` is the one that may write; `expires_after` counts the requests after which it is refused.

    `replaced` are bytes that readers get in place of a file's, as a bad cache or disk would give them. `sent` counts
    body bytes that readers took, by file; `ranges` says whether Range headers are honoured.
    """

    store: Store = field(default_factory=Store)
    faults: Faults = field(default_factory=Faults)
    token: str = "hf_good"
    expires_after: int | None = None
    echoes_token: bool = False
    replaced: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    sent: Counter[str] = field(default_factory=Counter)
    silence_seconds: float = SILENCE_SECONDS
    url: str = ""
    asked: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def put_folder(self, repo: str, folder: Path) -> str:
        """All files of a folder as one commit, as somebody else would have sent them."""
        tree = dict(self.store.repos[repo].commits[self.store.repos[repo].branches["main"]])
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                data, name = path.read_bytes(), path.relative_to(folder).as_posix()
                tree[name] = Stored(data, hashlib.sha256(data).hexdigest() if is_large(name, len(data)) else None)
        return self.store.repos[repo].add_commit("main", "a folder", tree)


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """Run it; `hub.url` is its address."""
    with listening(type("Handler", (_Handler,), {"hub": hub})) as hub.url:
        yield hub


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"
    timeout = 20
    wbufsize = -1  # an answer is one packet, not held back for the acknowledgement of another
    disable_nagle_algorithm = True
    body: bytes

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def _serve(self) -> None:
        path = urlsplit(self.path).path
        fault = self.hub.faults.draw(self.command, path)
        try:
            if fault == "drop-mid" and self.command in ("PUT", "POST"):
                self.rfile.read(int(self.headers.get("Content-Length", 0)) // 2)
                return self._cut()
            self.body = self._read_body()
            with self.hub.lock:
                self.hub.asked.append(f"{self.command} {path}")
            self._answer(path, fault)
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            self.close_connection = True

    def _read_body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, path: str, fault: Kind | None) -> None:
        if fault == "drop":
            return self._cut()
        if fault == "timeout":
            time.sleep(self.hub.silence_seconds)
            return self._cut()
        if fault is not None and fault.isdigit():
            return self._send((int(fault), {"error": f"fault {fault}"}, {}))
        with self.hub.lock:
            answer = self._refusal(path) or self._route(path)
        if fault == "lost-answer":
            return self._cut()
        return self._send(answer, half=fault == "drop-mid")

    def _cut(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _refusal(self, path: str) -> Answer | None:
        """401 for a token that is wrong or has expired. Content goes by signed links, without a token."""
        given = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        self.hub.tokens.add(given)
        if path.startswith("/content/") or (self.command in ("GET", "HEAD") and not given and "whoami" not in path):
            return None
        if self.hub.expires_after is not None:
            self.hub.expires_after -= 1
        if given == self.hub.token and (self.hub.expires_after is None or self.hub.expires_after >= 0):
            return None
        said = "Invalid credentials in Authorization header"
        if self.hub.echoes_token:
            return 401, {"error": f"{said}: {given}"}, {}
        return 401, {"error": said}, {"X-Error-Message": said}

    def _route(self, path: str) -> Answer:
        for method, pattern, handle in ROUTES:
            found = re.fullmatch(pattern, path)
            if found and self.command in method.split():
                return handle(self, *map(unquote, found.groups()))
        return 404, {"error": "no such route"}, {}

    def _send(self, answer: Answer, half: bool = False) -> None:
        status, value, headers = answer
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        kind = "application/octet-stream" if isinstance(value, bytes) else "application/json"
        for key, text in {"Content-Type": kind, "Content-Length": str(len(data)), **headers}.items():
            self.send_header(key, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if half else data)
        if half:
            self.wfile.flush()
            self._cut()

    # -- routes -----------------------------------------------------------------------------------------------------

    def repo(self, name: str) -> Repo | None:
        return self.hub.store.repos.get(name)

    def whoami(self) -> Answer:
        return 200, {"name": "somebody", "type": "user"}, {}

    def models(self) -> Answer:
        return 200, [{"id": name} for name in self.hub.store.repos], {}

    def create(self) -> Answer:
        asked = json.loads(self.body)
        name = f"{asked['organization']}/{asked['name']}"
        if not self.hub.store.create(name, asked.get("visibility") == "private" or bool(asked.get("private"))):
            return 409, {"error": "You already created this model repo", "url": f"{self.hub.url}/{name}"}, {}
        return 200, {"url": f"{self.hub.url}/{name}"}, {}

    def branch(self, name: str, branch: str) -> Answer:
        repo = self.repo(name)
        if repo is None:
            return NO_REPO
        if branch in repo.branches:
            return 409, {"error": "Reference already exists"}, {}
        repo.add_commit(branch, "branch", dict(repo.commits[repo.branches["main"]]))
        return 200, {}, {}

    def info(self, name: str, revision: str = "main") -> Answer:
        repo = self.repo(name)
        commit = None if repo is None else repo.resolve(revision)
        if repo is None or commit is None:
            return NO_REPO if repo is None else NO_REVISION
        files = []
        for path, file in sorted(repo.commits[commit].items()):
            row = {"rfilename": path, "size": len(file.data), "blobId": file.oid}
            if file.lfs is not None:
                row["lfs"] = {"sha256": file.lfs, "size": len(file.data), "pointerSize": 134}
            files.append(row)
        return 200, {"_id": "1", "id": name, "sha": commit, "private": repo.private, "siblings": files}, {}

    def tree(self, name: str, revision: str) -> Answer:
        repo = self.repo(name)
        commit = None if repo is None else repo.resolve(revision)
        if repo is None or commit is None:
            return NO_REPO if repo is None else NO_REVISION
        files = repo.commits[commit]
        folders = {path.rsplit("/", 1)[0] for path in files if "/" in path}
        rows = [file.listed(path) for path, file in sorted(files.items())]
        rows += [{"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in sorted(folders)]
        start = int(parse_qs(urlsplit(self.path).query).get("cursor", ["0"])[0])
        url = f"{self.hub.url}{urlsplit(self.path).path}?recursive=True&cursor={start + PAGE}"
        headers = {"Link": f'<{url}>; rel="next"'} if start + PAGE < len(rows) else {}
        return 200, rows[start : start + PAGE], headers

    def validate_yaml(self) -> Answer:
        return 200, {"errors": [], "warnings": []}, {}

    def preupload(self, name: str, revision: str) -> Answer:
        repo = self.repo(name)
        if repo is None:
            return NO_REPO
        tree = repo.commits[repo.branches[revision]]
        rows = []
        for file in json.loads(self.body)["files"]:
            there = tree.get(file["path"])
            mode = "lfs" if is_large(file["path"], file["size"]) else "regular"
            oid = None if there is None else there.lfs or there.oid
            rows.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return 200, {"files": rows}, {}

    def batch(self, name: str) -> Answer:
        objects = []
        for item in json.loads(self.body)["objects"]:
            oid, size = item["oid"], item["size"]
            row: dict[str, Any] = {"oid": oid, "size": size}
            if not self.hub.store.has_room(size):
                said = "You have exceeded your storage quota"
                return 403, {"error": said}, {"X-Error-Message": said}
            if oid not in self.hub.store.contents:
                upload: dict[str, Any] = {"href": f"{self.hub.url}/content/{oid}"}
                if size > PART_BYTES:
                    count = -(-size // PART_BYTES)
                    links = {str(part): f"{self.hub.url}/content/{oid}/{part}" for part in range(1, count + 1)}
                    upload["header"] = {"chunk_size": str(PART_BYTES), **links}
                row["actions"] = {"upload": upload, "verify": {"href": f"{self.hub.url}/api/{name}/verify"}}
            objects.append(row)
        return 200, {"transfer": "multipart", "objects": objects}, {}

    def put_content(self, oid: str) -> Answer:
        return (200, {}, {}) if self.hub.store.put(oid, self.body) else (400, {"error": "wrong hash"}, {})

    def put_part(self, oid: str, part: str) -> Answer:
        self.hub.store.parts.setdefault(oid, {})[int(part)] = self.body
        return 200, {}, {"ETag": f'"{len(self.body)}-{part}"'}

    def complete(self, oid: str) -> Answer:
        parts = self.hub.store.parts.get(oid, {})
        listed = [row["partNumber"] for row in json.loads(self.body)["parts"]]
        return self._completed(oid, b"".join(parts.get(number, b"") for number in listed))

    def _completed(self, oid: str, data: bytes) -> Answer:
        return (200, {}, {}) if self.hub.store.put(oid, data) else (400, {"error": "wrong hash"}, {})

    def verify(self, name: str) -> Answer:
        there = json.loads(self.body)["oid"] in self.hub.store.contents
        return (200, {}, {}) if there else (404, {"error": "not uploaded"}, {})

    def commit(self, name: str, branch: str) -> Answer:
        repo = self.repo(name)
        if repo is None:
            return NO_REPO
        commit, problem = self.hub.store.commit(repo, branch, self.body.splitlines())
        if commit is None:
            return 400, {"error": problem}, {}
        url = f"{self.hub.url}/{name}/commit/{commit}"
        return 200, {"success": True, "commitUrl": url, "commitOid": commit, "pullRequestUrl": None}, {}

    def resolve(self, name: str, revision: str, path: str) -> Answer:
        repo = self.repo(name)
        commit = None if repo is None else repo.resolve(revision)
        if repo is None or commit is None:
            return NO_REPO if repo is None else NO_REVISION
        file = repo.commits[commit].get(path)
        if file is None:
            return 404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"}
        data = self.hub.replaced.get(path, file.data)
        headers = {"ETag": f'"{file.lfs or file.oid}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if wanted is None or not self.hub.ranges:
            self.count(path, len(data))
            return 200, data, headers
        start, stop = int(wanted[1]), min(int(wanted[2] or len(data)) + 1, len(data))
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        self.count(path, stop - start)
        return 206, data[start:stop], headers

    def count(self, path: str, size: int) -> None:
        if self.command == "GET":
            self.hub.sent[path] += size


NO_REPO: Answer = (404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
NO_REVISION: Answer = (404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
NAME = r"([^/]+/[^/]+)"
Route = tuple[str, str, Callable[..., Answer]]
ROUTES: tuple[Route, ...] = (
    ("GET", "/api/whoami-v2", _Handler.whoami),
    ("GET", "/api/models", _Handler.models),
    ("POST", "/api/repos/create", _Handler.create),
    ("POST", "/api/validate-yaml", _Handler.validate_yaml),
    ("GET", f"/api/models/{NAME}", _Handler.info),
    ("GET", f"/api/models/{NAME}/revision/([^/]+)", _Handler.info),
    ("GET", f"/api/models/{NAME}/tree/([^/]+)", _Handler.tree),
    ("POST", f"/api/models/{NAME}/branch/([^/]+)", _Handler.branch),
    ("POST", f"/api/models/{NAME}/preupload/([^/]+)", _Handler.preupload),
    ("POST", f"/api/models/{NAME}/commit/([^/]+)", _Handler.commit),
    ("POST", f"/api/{NAME}/verify", _Handler.verify),
    ("POST", f"/{NAME}.git/info/lfs/objects/batch", _Handler.batch),
    ("PUT", "/content/([^/]+)", _Handler.put_content),
    ("PUT", r"/content/([^/]+)/(\d+)", _Handler.put_part),
    ("POST", "/content/([^/]+)", _Handler.complete),
    ("GET HEAD", f"/{NAME}/resolve/([^/]+)/(.+)", _Handler.resolve),
)
