"""A web server that can be told to misbehave, and what is needed to download from it."""

import hashlib
import io
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from rich.console import Console
from rich.progress import Progress


class Server:
    """A web server on this machine that serves `files`, and cuts its answers if told.

    Attributes:
        files: contents by name.
        cuts: bytes after which the next answers end; further answers are complete.
        requests: names of what was asked for.
    """

    def __init__(self):
        self.files, self.cuts, self.requests = {}, [], []
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
        name = handler.path.lstrip("/")
        self.requests.append(name)
        if name not in self.files:
            handler.send_error(404)
            return
        content = self.files[name]
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content[: self.cuts.pop(0) if self.cuts else None])

    @property
    def address(self):
        return f"http://127.0.0.1:{self.http.server_port}"

    def publish(self, files):
        """Serves the contents; returns their true digests."""
        self.files |= files
        return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}

    def publish_file(self, content):
        """Serves one file; returns its address and digest."""
        (digest,) = self.publish({"file.bin": content}).values()
        return f"{self.address}/file.bin", digest

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


def silent():
    """Bars that nobody sees."""
    return Progress(console=Console(file=io.StringIO()))
