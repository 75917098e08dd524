"""A model hub on this machine: the few calls that sending and fetching a model take, kept in memory."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c" * 40


@dataclass
class Hub:
    """What it holds and what it was asked."""

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)  # by model, then by name
    blobs: dict[str, bytes] = field(default_factory=dict)
    created: list[dict[str, Any]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    address: str = ""

    def is_large(self, name: str) -> bool:
        return name.endswith((".safetensors", ".webp", ".png"))

    def entry(self, name: str, content: bytes) -> dict[str, Any]:
        oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        about: dict[str, Any] = {"type": "file", "path": name, "oid": oid, "size": len(content)}
        if self.is_large(name):
            about["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
        return about


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *words: Any) -> None:
        """Quiet."""

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            content = b""
            while size := int(self.rfile.readline(), 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return content
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _send(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        headers.setdefault("Content-Length", str(len(content)))
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), Content_Type="application/json")

    def do_POST(self) -> None:
        path, body = unquote(urlsplit(self.path).path), self._body()
        self.hub.asked.append(f"POST {path}")
        if path == "/api/repos/create":
            wanted = json.loads(body)
            self.hub.created.append(wanted)
            name = f"{wanted['organization']}/{wanted['name']}" if wanted.get("organization") else wanted["name"]
            self.hub.files.setdefault(name, {})
            return self._json({"url": f"{self.hub.address}/{name}"})
        if path == "/api/validate-yaml":
            head = json.loads(body)["content"].split("---")[1]
            return self._json({"errors": [] if "license:" in head else [{"message": "no licence"}], "warnings": []})
        if "/preupload/" in path:
            files = [one["path"] for one in json.loads(body)["files"]]
            modes = [{"path": one, "uploadMode": "lfs" if self.hub.is_large(one) else "regular"} for one in files]
            return self._json({"files": [{**one, "shouldIgnore": False, "oid": None} for one in modes]})
        if path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**one, "actions": {"upload": {"href": f"{self.hub.address}/put/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            return self._json({"transfer": "basic", "objects": objects})
        if "/commit/" in path:
            name = "/".join(path.split("/")[3:5])
            self._commit(self.hub.files[name], body)
            return self._json({"commitUrl": f"{self.hub.address}/{name}/commit/{COMMIT}", "commitOid": COMMIT})
        return self._json({"error": "not found"}, 404)

    def _commit(self, files: dict[str, bytes], body: bytes) -> None:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
            elif line["key"] == "deletedFile":
                files.pop(value["path"], None)

    def do_PUT(self) -> None:
        self.hub.blobs[self.path.rsplit("/", 1)[1]] = self._body()
        self._send(200)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{self.command} {path}")
        pieces = path.strip("/").split("/")
        name = "/".join(pieces[2:4] if pieces[0] == "api" else pieces[:2])
        files = self.hub.files.get(name)
        if files is None:
            return self._send(404, b"{}", X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
        if pieces[0] == "api" and "tree" in pieces:
            return self._json([self.hub.entry(one, content) for one, content in files.items()])
        if pieces[0] == "api":
            siblings = [{"rfilename": one, "size": len(content)} for one, content in files.items()]
            return self._json({"id": name, "modelId": name, "sha": COMMIT, "private": False, "siblings": siblings})
        content = files.get("/".join(pieces[4:]))
        if content is None:
            return self._send(404, b"{}", X_Error_Code="EntryNotFound", X_Error_Message="no such file")
        etag = hashlib.sha256(content).hexdigest()
        return self._send(200, content, ETag=f'"{etag}"', X_Repo_Commit=COMMIT, X_Linked_Size=str(len(content)))


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub at a free port of this machine."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
