import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from stepgauge.train.checkpoint import Checkpoints


def test_an_opened_checkpoint_reads_only_what_is_accessed(tmp_path, monkeypatch):
    names = ["blocks.0.weight", "blocks.0.weight_2", "blocks.1.weight"]
    state = {
        "model": {name: torch.full((2, 3), float(n)) for n, name in enumerate(names)},
        "optimizer": {
            "state": {
                name: {"exp_avg": torch.full((2, 3), 10.0 + n), "step": torch.tensor(float(n))}
                for n, name in enumerate(names[1:])
            },
            "param_groups": [{"lr": 0.5, "params": names}],
        },
        "scaler": {},
    }
    checkpoints = Checkpoints(tmp_path)
    folder = checkpoints.save(3, state, {}, keep=1)
    read = []
    read_data = FileSystemReader.read_data

    def counted(self, plan, planner):
        read.extend(item.dest_index.fqn for item in plan.items)
        return read_data(self, plan, planner)

    monkeypatch.setattr(FileSystemReader, "read_data", counted)
    opened = checkpoints.open(folder)
    assert read and all(name.startswith("optimizer.param_groups") for name in read)
    assert opened["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
    assert list(opened["model"]) == names and list(opened["optimizer"]["state"]) == names[1:]
    assert "blocks.0.weight" not in opened["optimizer"]["state"]
    with pytest.raises(KeyError, match=r"blocks\.2"):
        opened["model"]["blocks.2"]
    read.clear()
    assert "blocks.0.weight" in opened["model"] and not read
    assert torch.equal(opened["model"]["blocks.0.weight"], state["model"]["blocks.0.weight"])
    assert read == ["model.blocks.0.weight"]
    found = opened["optimizer"]["state"]["blocks.1.weight"]
    assert found["step"] == 1 and torch.equal(found["exp_avg"], torch.full((2, 3), 11.0))
    whole = checkpoints.load(folder)
    assert torch.equal(whole["model"]["blocks.1.weight"], state["model"]["blocks.1.weight"])
