"""torch.distributed.checkpoint: what two ranks wrote, one process and four ranks read."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from loop.expected import assert_close, build, mean_loss
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

import consequent
from ranks.test_ddp import share
from ranks.test_fsdp import shard


class Training:
    def __init__(self, wrapper, ready_made):
        self.model, self.x, self.t = build("conv", batch=8)
        self.whole = self.model
        if wrapper == "fsdp":
            shard(self.model, "layers")
        elif wrapper == "ddp":
            self.model = DDP(self.model)
        options = {"lr": 0.05, "momentum": 0.9}
        if ready_made:
            self.optimizer = consequent.CSGD(self.model, damping=0.1, **options)
            self.correction = self.optimizer.correction
        else:
            self.optimizer = torch.optim.SGD(self.model.parameters(), **options)
            self.correction = consequent.attach(self.optimizer, self.model, damping=0.1)
        if wrapper:
            self.x, self.t = share(self.x), share(self.t)

    def steps(self, count):
        for _ in range(count):
            self.optimizer.zero_grad()
            mean_loss(self.model(self.x), self.t).backward()
            self.optimizer.step()

    def save(self, folder):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer, "correction": self.correction}, checkpoint_id=folder)

    def load(self, folder):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer, "correction": self.correction}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def weights(self):
        tensors = dict(self.whole.named_parameters())
        return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for n, p in tensors.items()}


def write(wrapper, ready_made, folder):
    training = Training(wrapper, ready_made)
    training.correction.damping = 0.2
    training.steps(3)
    training.save(folder)


def read(wrapper, ready_made, folder):
    training = Training(wrapper, ready_made)
    with pytest.warns(consequent.ConsequentWarning, match=r"damping=0\.2, which takes the place of damping=0\.1"):
        training.load(folder)
    assert training.correction.damping == 0.2
    assert training.correction.counters.steps == 3
    training.steps(2)
    assert training.correction.counters.steps == 5
    return training.weights()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("ready_made", [False, True])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_written_on_two_ranks_read_on_one_and_four(two, four, tmp_path, wrapper, ready_made):
    two.run(write, wrapper, ready_made, tmp_path)
    expected = Training(None, ready_made)
    expected.correction.damping = 0.2
    expected.steps(5)
    assert_close(read(None, ready_made, tmp_path), expected.weights(), 1e-9)
    assert not dist.is_initialized()
    for found in four.run(read, wrapper, ready_made, tmp_path):
        assert_close(found, expected.weights(), 1e-9)
