"""What a Hub on this machine holds: repositories, branches, commits, and contents by hash."""

import base64
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

LFS_THRESHOLD = 2000  # bytes; the Hub's is 10 MB
LFS_SUFFIXES = (".safetensors", ".bin")


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


@dataclass(frozen=True)
class Stored:
    """A file of a commit. `lfs` is the hash by which large content is kept, None for content in git itself."""

    data: bytes
    lfs: str | None

    @property
    def oid(self) -> str:
        """Git's hash: of the content, or of the pointer that stands for large content."""
        return git_sha1(self.data if self.lfs is None else b"pointer " + self.lfs.encode())

    def listed(self, path: str) -> dict[str, Any]:
        row: dict[str, Any] = {"type": "file", "path": path, "size": len(self.data), "oid": self.oid}
        if self.lfs is not None:
            row["lfs"] = {"oid": self.lfs, "size": len(self.data), "pointerSize": 134}
        return row


Tree = dict[str, Stored]


@dataclass
class Repo:
    """Branches name commits; each commit is a whole tree. `history` keeps every tree that was ever visible."""

    private: bool
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Tree] = field(default_factory=dict)
    history: list[tuple[str, str, Tree]] = field(default_factory=list)

    def resolve(self, revision: str) -> str | None:
        return self.branches.get(revision, revision if revision in self.commits else None)

    def add_commit(self, branch: str, message: str, tree: Tree) -> str:
        text = json.dumps([branch, message, len(self.history), sorted((path, file.oid) for path, file in tree.items())])
        commit = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        self.commits[commit] = tree
        self.branches[branch] = commit
        self.history.append((branch, message, tree))
        return commit


@dataclass
class Store:
    """`quota_bytes` limits large content; `corrupt` names files that are kept with another hash than was sent."""

    repos: dict[str, Repo] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)
    parts: dict[str, dict[int, bytes]] = field(default_factory=dict)
    quota_bytes: int | None = None
    corrupt: tuple[str, ...] = ()
    received_bytes: int = 0

    def create(self, name: str, private: bool) -> bool:
        """False if it exists. A new one has the file that the Hub puts there."""
        if name in self.repos:
            return False
        self.repos[name] = Repo(private)
        self.repos[name].add_commit("main", "initial commit", {".gitattributes": Stored(b"* -text\n", None)})
        return True

    def has_room(self, size: int) -> bool:
        return self.quota_bytes is None or sum(map(len, self.contents.values())) + size <= self.quota_bytes

    def put(self, oid: str, data: bytes) -> bool:
        """Keep content; False if it is not what its name says."""
        self.received_bytes += len(data)
        if hashlib.sha256(data).hexdigest() != oid:
            return False
        self.contents[oid] = data
        return True

    def commit(self, repo: Repo, branch: str, lines: Iterable[bytes]) -> tuple[str | None, str]:
        """Apply an ndjson commit as a whole or not at all: (commit, "") or (None, what is wrong)."""
        tree, message = dict(repo.commits[repo.branches[branch]]), ""
        for line in lines:
            item = json.loads(line)
            key, value = item["key"], item["value"]
            if key == "header":
                message = value["summary"]
            elif key == "file":
                tree[value["path"]] = self._kept(value["path"], base64.b64decode(value["content"]), None)
            elif key == "lfsFile":
                if value["oid"] not in self.contents:
                    return None, f"LFS pointer pointed to a file that does not exist: {value['path']}"
                tree[value["path"]] = self._kept(value["path"], self.contents[value["oid"]], value["oid"])
            elif key == "deletedFile":
                if value["path"] not in tree:
                    return None, "A file with this name doesn't exist"
                del tree[value["path"]]
            else:
                return None, f"unknown operation {key}"
        return repo.add_commit(branch, message, tree), ""

    def _kept(self, path: str, data: bytes, lfs: str | None) -> Stored:
        if path in self.corrupt:
            data = bytes([data[0] ^ 1]) + data[1:]
            lfs = None if lfs is None else hashlib.sha256(data).hexdigest()
        return Stored(data, lfs)


def is_large(path: str, size: int) -> bool:
    return size > 0 and (path.endswith(LFS_SUFFIXES) or size > LFS_THRESHOLD)
