"""The cost model against the bytes that really go through the sockets of gloo."""

import os
import socket
import stat
import struct

import pytest
import torch
import torch.distributed as dist
from loop.expected import mean_loss
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

import consequent
from consequent.ranks.traffic import Traffic
from ranks.sharing import shared

pytestmark = pytest.mark.slow

BYTES_ACKED = 120  # its place in Linux's struct tcp_info


def bytes_sent():
    """By this process, through all of its TCP connections."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.stat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += struct.unpack_from("Q", info, BYTES_ACKED)[0]
        except OSError:  # no TCP socket, or gone
            continue
    return total


class Images(nn.Module):
    def __init__(self, channels, size):
        super().__init__()
        self.layer, self.size = nn.Conv2d(channels, channels, 3, padding=1), size

    def forward(self, x):
        return self.layer(x).mean((-2, -1))


# model, one rank's inputs, outputs, what is sent
CASES = {
    "rows": (lambda: nn.Sequential(nn.Linear(1500, 1000), nn.Tanh(), nn.Linear(1000, 800)), (60, 1500), 800),
    "moment": (lambda: nn.Sequential(nn.Linear(600, 80)), (700, 600), 80),
    "inputs": (lambda: Images(48, 10), (6, 48, 10, 10), 48),
}
# Four moments, one of them (4.6 MB) of more bytes than gloo's sum at one rank takes well on two ranks.
SHARED = (
    lambda: nn.Sequential(nn.Linear(600, 1500), nn.Tanh(), nn.Linear(1500, 600), nn.Linear(600, 80), nn.Linear(80, 9)),
    (1600, 600),
    9,
)


def measure(name):
    make, shape, outputs = CASES.get(name, SHARED)
    torch.manual_seed(0)
    ddp = DDP(make())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    correction = consequent.attach(optimizer, ddp, damping=0.1)
    x, t = torch.randn(shape), torch.randn(shape[0], outputs)
    for _ in range(3):
        optimizer.zero_grad()
        mean_loss(ddp(x), t).backward()
        dist.barrier()
        before = bytes_sent()
        optimizer.step()
        dist.barrier()
        sent = bytes_sent() - before
    traffic = correction.communication()
    assert "ranks; each sent" in str(traffic)
    return sent, traffic.last_step, [(layer.choice, layer.bytes[layer.choice]) for layer in traffic.layers]


def check(results, name):
    for sent, model, layers in results:
        assert {choice for choice, _ in layers} == {name}
        assert sent == pytest.approx(model, rel=0.03)
        assert model == pytest.approx(sum(size for _, size in layers), rel=0.03)  # the rest is small


def check_shared(answers):
    """All ranks together: to and from one rank, the ranks do not send as much each."""
    assert all(len(owners) == 4 and len(set(owners)) > 1 for _, owners in answers)
    results = [result for result, _ in answers]
    model = sum(model for _, model, _ in results)
    assert sum(sent for sent, _, _ in results) == pytest.approx(model, rel=0.03)
    assert model == pytest.approx(sum(size for _, _, layers in results for _, size in layers), rel=0.03)


def test_factorisations_shared_out_over_two_ranks(two):
    check_shared(two.run(shared, measure, "shared", timeout=60))


def test_factorisations_shared_out_over_four_ranks(four):
    check_shared(four.run(shared, measure, "shared", timeout=60))


@pytest.mark.parametrize("name", CASES)
def test_two_ranks(two, name):
    check(two.run(measure, name), name)


@pytest.mark.parametrize("name", CASES)
def test_four_ranks(four, name):
    check(four.run(measure, name), name)


def test_the_table():
    traffic = Traffic(4)
    traffic.begin_step()
    traffic.add_summed(1_000_000)
    traffic.add_gathered(4_000)
    assert traffic.last_step == 1_503_000
    assert str(traffic).startswith("4 ranks; each sent 1.5 MB for the last step")
