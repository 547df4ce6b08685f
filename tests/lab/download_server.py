"""A web server that can be told to misbehave, and what is needed to download from it."""

import hashlib
import io
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from consequent_lab.downloads import Remote


class Server:
    """A web server on this machine that serves `files`, and cuts, lies or ignores ranges if told.

    Attributes:
        files: contents by name.
        cuts: bytes after which the next answers end; an answer without an entry is complete.
        ranges: whether a Range header is heard.
        unsized: whether it keeps the length to itself.
        requests: name and Range header of what was asked for.
    """

    def __init__(self):
        self.files, self.cuts, self.ranges, self.unsized, self.requests = {}, [], True, False, []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                server.answer(self)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()

    def answer(self, handler):
        name, asked = handler.path.lstrip("/"), handler.headers.get("Range")
        self.requests.append((name, asked))
        if name not in self.files:
            handler.send_error(404)
            return
        content, start = self.files[name], 0
        if asked and self.ranges:
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            handler.send_response(206)
            handler.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            handler.send_response(200)
        if not self.unsized:
            handler.send_header("Content-Length", str(len(content) - start))
        handler.end_headers()
        end = start + self.cuts.pop(0) if self.cuts else len(content)
        handler.wfile.write(content[start:end])

    def publish(self, name, content):
        """Serves the content; returns it as a published file with its true digest."""
        self.files[name] = content
        url = f"http://127.0.0.1:{self.http.server_port}/{name}"
        return Remote(url, len(content), hashlib.sha256(content).hexdigest())

    def close(self):
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


def archive_of(folder, inner):
    """A .tar.gz with the folder's files in a folder `inner`, as CIFAR's archives are."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as members:
        members.add(folder, arcname=inner)
    return packed.getvalue()


def silent(*_):
    pass
