import pytest
import torch

from stepgauge.bench.user_model import build_own, load_factory

MODEL = """
import torch
from torch import nn
def factory():
    return nn.Linear(4, 3), (torch.ones(2, 4),)
def wrong():
    return nn.Linear(4, 3)
def frozen():
    return nn.Identity(), (torch.ones(1),)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MODEL)
    return path


def test_a_step_of_an_own_model_changes_its_parameters(file):
    step, batch = build_own(f"{file}:factory", device=torch.device("cpu"))
    before = step.module.weight.detach().clone()
    loss = step.forward(*batch)
    step.backward(loss)
    assert torch.equal(loss, step.module(*batch).mean())
    step.update()
    assert not torch.equal(before, step.module.weight)


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("{file}:nothing", "has no function 'nothing'; it has factory, wrong, frozen"),
        ("{file}:wrong", "it must return (module, batch)"),
        ("{file}:frozen", "without trainable parameters"),
        ("{file}", "name it as FILE.py:factory"),
        ("missing.py:factory", "there is no file missing.py"),
    ],
)
def test_what_is_no_model_is_said(file, where, said):
    with pytest.raises(ValueError, match=r".") as error:
        build_own(where.format(file=file), device=torch.device("cpu"))
    assert said in str(error.value)


def test_a_file_that_does_not_import_is_said(tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_of_that_name")
    with pytest.raises(ValueError, match="cannot be imported: ModuleNotFoundError"):
        load_factory(f"{tmp_path / 'broken.py'}:factory")
