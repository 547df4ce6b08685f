"""Small data sets in place of the official ones, on disk and on a web server."""

from dataclasses import replace

import pytest
from download_server import Server, archive_of
from small_datasets import SMALL, SMALL_CIFAR10, SMALL_CIFAR100, SMALL_FASHION, write_cifar, write_fashion

from consequent_lab import downloads
from consequent_lab.datasets import LAYOUTS


@pytest.fixture
def small(monkeypatch):
    """Makes the command line believe that the data sets are small."""
    for name, layout in SMALL.items():
        monkeypatch.setitem(LAYOUTS, name, layout)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr("pooch.core.time.sleep", lambda seconds: None)  # between attempts
    monkeypatch.setattr(downloads, "CHUNK", 999)
    monkeypatch.setenv("no_proxy", "*")
    one = Server()
    yield one
    one.close()


@pytest.fixture
def published(server, small, tmp_path, monkeypatch):
    """Publishes the small data sets on the server; returns what is in them."""
    origin = tmp_path / "origin"
    truth = {}
    for layout in (SMALL_CIFAR10, SMALL_CIFAR100):
        truth[layout.name] = write_cifar(layout, origin / layout.name)
        (name,) = layout.digests
        digests = server.publish({name: archive_of(origin / layout.name, layout.places[0])})
        monkeypatch.setitem(LAYOUTS, layout.name, replace(layout, address=server.address, digests=digests))
    truth["fashion-mnist"] = write_fashion(SMALL_FASHION, origin / "fashion", packed=True)
    digests = server.publish({name: (origin / "fashion" / name).read_bytes() for name in SMALL_FASHION.digests})
    monkeypatch.setitem(LAYOUTS, "fashion-mnist", replace(SMALL_FASHION, address=server.address, digests=digests))
    return truth
