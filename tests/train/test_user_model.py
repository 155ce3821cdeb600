"""A user's network as a training step: what the factory may return, and errors for anything else."""

import pytest
import torch
from torch import nn

from stepgauge.spec.user_model import UserModel, source_digest
from stepgauge.train.user_model import UserParts, build_user_step, load_factory, step_of_parts

CPU = torch.device("cpu")
MODEL = """
import torch
from torch import nn
from torch.nn.functional import relu
from torch.utils.data import Dataset
class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
    def forward(self, x, labels=None):
        return {"logits": self.linear(x), "loss": self.linear(x).square().sum()}
def pair(): return nn.Linear(4, 3), (torch.ones(2, 4),)
def tensor(): return nn.Linear(4, 3), torch.ones(2, 4)
def named(): return Named(), {"x": torch.ones(2, 4), "labels": None}
def triple(): return nn.Linear(4, 3), (torch.ones(2, 4), torch.tensor([0, 2])), nn.CrossEntropyLoss()
def whole():
    return {"module": nn.Linear(4, 3), "batches": lambda i: torch.full((2, 4), float(i)),
            "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.5)}
def wrong(): return nn.Linear(4, 3)
def odd(): return {"module": nn.Linear(4, 3), "batch": 1, "bach": 2}
def frozen(): return nn.Identity(), (torch.ones(1),)
def unreduced():
    return nn.Linear(4, 3), (torch.ones(2, 4), torch.ones(2, 3)), nn.MSELoss(reduction="none")
def ids(): return nn.Linear(4, 3), (torch.ones(2, 4),), nn.CrossEntropyLoss()
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MODEL)
    return path


class Spec:
    precision, optimizer, compile, seed = "fp32", "sgd", "off", 0

    def __init__(self, where, **changes):
        self.model = UserModel.read(where)
        self.__dict__.update(changes)


@pytest.mark.parametrize(
    ("factory", "optimizer", "expected"),
    [
        ("pair", "sgd", lambda module, x: module(x).mean()),
        ("tensor", "sgd", lambda module, x: module(x).mean()),
        ("named", "sgd", lambda module, x: module.linear(x).square().sum()),
        ("triple", "sgd", lambda m, x: nn.functional.cross_entropy(m(x), torch.tensor([0, 2]))),
        ("whole", "adamw", lambda module, x: module(x).mean()),
    ],
)
def test_a_step_has_the_users_loss_and_changes_the_parameters(file, factory, optimizer, expected):
    built = build_user_step(Spec(f"{file}:{factory}", optimizer=optimizer), CPU, lr=0.1)
    arguments = built.arguments(1)
    before = [p.detach().clone() for p in built.step.module.parameters()]
    loss = built.step.forward(*arguments)
    assert torch.equal(loss, expected(built.step.module, torch.ones(2, 4)))
    built.step.backward(loss)
    built.step.update()
    after = list(built.step.module.parameters())
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert built.num_parameters == 15
    if factory == "whole":
        assert built.step.optimizer.param_groups[0]["lr"] == 0.5
        assert built.arguments(3)[0][0, 0] == 3


def test_bf16_parameters_get_bf16_inputs():
    parts = UserParts.of((nn.Linear(4, 3), torch.ones(2, 4)), "here")
    built = step_of_parts(parts, CPU, precision="bf16-pure", lr=0.1)
    assert built.step.forward(*built.arguments(0)).dtype == torch.float32
    assert built.step.module.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_network_of_another_type_gets_inputs_of_its_type(dtype):
    module, x = nn.Linear(4, 3).to(dtype), torch.ones(2, 4, dtype=dtype)
    built = step_of_parts(UserParts.of((module, x), "here"), CPU, lr=0.1)
    assert built.step.forward(*built.arguments(0)).dtype == torch.float32


@pytest.mark.parametrize("precision", ["fp32", "bf16-pure"])
def test_complex_parameters_stay_complex(precision):
    module = nn.Linear(4, 3)
    module.filter = nn.Parameter(torch.full((3,), 1j))
    parts = UserParts.of((module, torch.ones(2, 4)), "here")
    built = step_of_parts(parts, CPU, precision=precision, lr=0.1)
    assert torch.equal(built.step.module.filter, torch.full((3,), 1j))
    loss = built.step.forward(*built.arguments(0))
    built.step.backward(loss)
    built.step.update()  # fused AdamW refuses complex parameters
    assert built.step.module.weight.is_floating_point()


def test_an_optimizer_function_gets_all_parameters_and_may_group_them():
    def decayed(parameters):
        matrices = [{"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1}]
        return torch.optim.AdamW([*matrices, {"params": [p for p in parameters if p.ndim < 2]}])

    parts = {"module": nn.Linear(4, 3), "batch": torch.ones(2, 4), "optimizer": decayed}
    optimizer = step_of_parts(UserParts.of(parts, "here"), CPU, lr=0.1).step.optimizer
    assert [[*group["params"][0].shape] for group in optimizer.param_groups] == [[3, 4], [3]]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("batches", [torch.ones(100, 4)], "batches of type list; it must be a function of 0, 1"),
        ("optimizer", torch.optim.SGD([torch.ones(1)]), "optimizer of type SGD; it must be a func"),
    ],
)
def test_a_part_that_must_be_a_function_is_refused_with_its_type(name, value, said):
    with pytest.raises(ValueError, match=said) as error:
        UserParts.of({"module": nn.Linear(4, 3), "batch": torch.ones(2, 4), name: value}, "here")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (
            {"module": nn.Linear(4, 3), "bach": 1},
            "returned a dict with 'bach'; it may have module, ",
        ),
        ({"module": nn.Linear(4, 3)}, "returned a dict without a 'batch' or 'batches'"),
        ({"batch": 1}, "returned module of type NoneType; it must be an nn.Module"),
        ((1, 2), "returned module of type int; it must be an nn.Module"),
    ],
)
def test_a_wrong_and_a_missing_part_are_named(made, said):
    with pytest.raises(ValueError, match=said):
        UserParts.of(made, "here")


def test_a_shape_that_does_not_fit_names_the_module():
    network = nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.ReLU(), nn.Linear(5, 2)))
    built = step_of_parts(UserParts.of((network, torch.ones(2, 4)), "here"), CPU, lr=0.1)
    with pytest.raises(RuntimeError, match=r"^in module 1\.1 \(Linear\): mat1 and mat2"):
        built.step.forward(*built.arguments(0))


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("{file}:nothing", "has no function 'nothing'; it has pair, tensor"),
        ("{file}:wrong", "returned Linear; it must return (module, batch)"),
        ("{file}:odd", "returned a dict with 'bach'"),
        ("{file}:frozen", "Identity has no trainable parameters"),
        ("{file}:whole", "optimizer is 'sgd'; the user's model brings its own optimizer"),
        (
            "{file}:unreduced",
            "the loss function returned a tensor of shape 2 × 3; it must return a scalar",
        ),
        ("{file}:ids", "the batch must be a pair (inputs, targets)"),
        ("{file}", "name it as FILE.py:factory"),
        ("missing.py:factory", "there is no file missing.py"),
    ],
)
def test_unusable_models_are_refused(file, where, said):
    with pytest.raises(ValueError) as error:
        built = build_user_step(Spec(where.format(file=file)), CPU, lr=0.1)
        built.step.forward(*built.arguments(0))
    assert said in str(error.value)


def test_an_import_error_names_its_line(tmp_path):
    for text, said in (
        ("import json\nimport nothing_of_that_name", "line 2: ModuleNotFoundError"),
        ("import sys\nsys.exit(3)", "line 2: SystemExit: 3"),
    ):
        (tmp_path / "broken.py").write_text(text)
        with pytest.raises(ValueError, match=r"broken\.py cannot be imported: " + said):
            load_factory(UserModel.read(f"{tmp_path / 'broken.py'}:factory"))


def test_the_digest_covers_imported_neighbours(tmp_path):
    (tmp_path / "parts").mkdir()
    sources = {
        "mine.py": "import json, other\nfrom parts.block import Block",
        "other.py": "import mine",
        "parts/block.py": "",
        "unused.py": "",
        "json.pyx": "",
    }
    for name, text in sources.items():
        (tmp_path / name).write_text(text)
    seen = [source_digest(tmp_path / "mine.py")]
    for name in ("mine.py", "other.py", "parts/block.py"):
        (tmp_path / name).write_text(sources[name] + "\nx = 1")
        seen.append(source_digest(tmp_path / "mine.py"))
    assert len(set(seen)) == 4
    (tmp_path / "unused.py").write_text("x = 1")
    assert source_digest(tmp_path / "mine.py") == seen[-1]
