"""Memory predictions where torch's own fake tensors would be wrong: for CUDA, compared with recorded
measurements of an H100 and an H200, and for small user models.
"""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from stepgauge.bench.memory import measure, predicted
from stepgauge.measure.memory.attention_backend import AttentionCall, backend
from stepgauge.report.memory import summary_table
from stepgauge.spec.memory import MemorySpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.record import Record
from stepgauge.spec.user_model import UserModel

needs_fake_cuda = pytest.mark.skipif(
    not torch.cuda.is_available() and shutil.which("g++") is None,
    reason="fake CUDA needs a C++ compiler",
)
RESULTS = Path(__file__).parents[2] / "benchmarks/results"
SPEC = MemorySpec(model=ModelSpec(num_layers=2), batch=4)


def recorded_steps():
    """Returns the specs of three uncompiled steps of the smallest size, with the peaks measured on an
    H100: stock PyTorch in fp32 and bf16, our kernels in bf16.
    """
    fields = {field.name for field in dataclasses.fields(MemorySpec)}
    selected = {"compile": "off", "size": "small", "batch": 4}.items()
    rows = {}
    for name in ("2026-11-21-h100-study.jsonl", "2026-11-21-h100-step-fused.jsonl"):
        for record in records_of(name):
            spec = record.spec
            if record.kind != "step" or record.status != "ok" or not selected <= spec.items():
                continue
            if spec["precision"] in ("fp32", "bf16") and spec["model"]["context_length"] == 512:
                shared = {name: spec[name] for name in fields & {*spec}}
                row = shared, record.median("peak_bytes")
                rows[spec["precision"], spec["model"].get("norm") == "triton"] = row
    return list(rows.values())


def recorded_checkpointing():
    """Returns the specs of checkpointed steps, with the peaks of an H200's allocator."""
    return [
        (record.spec, record.median("peak_bytes"))
        for record in records_of("2026-11-21-h200-memory.jsonl")
        if record.spec["size"] == "small"
        and record.spec["checkpointing"] in ("blocks", "selective")
    ][1:]  # one block, four blocks together, and selective


def records_of(name):
    return [Record.from_json(line) for line in (RESULTS / name).read_text().splitlines()]


@needs_fake_cuda
def test_predictions_for_cuda_are_within_half_a_percent_of_measurements_on_gpus(tmp_path):
    """It runs in another process, because registering fake CUDA lasts for the whole process."""
    recorded = [*recorded_steps(), *recorded_checkpointing()]
    assert len(recorded) == 5
    # The last row uses another optimizer, adamw-loop, whose peak is no higher than the fused one's.
    specs = [spec for spec, _ in recorded] + [recorded[-1][0] | {"optimizer": "adamw-loop"}]
    *fused, loop = predictions([row | {"predict": "sm90"} for row in specs])
    for (spec, measured), record in zip(recorded, fused, strict=True):
        assert abs(record.median("peak_bytes") / measured - 1) < 0.005, spec
    assert loop.median("peak_bytes") < max(measured for _, measured in recorded)


def predictions(rows):
    """Returns the modelled records of the specs, predicted in another process."""
    code = (
        "import json, sys\n"
        "from stepgauge.bench.memory import predicted\n"
        "from stepgauge.spec.memory import MemorySpec\n"
        "from stepgauge.spec.model import ModelSpec\n"
        "from stepgauge.spec.user_model import UserModel\n"
        "for row in json.loads(sys.argv[1]):\n"
        "    user = row['model'].pop('network', '')\n"
        "    model = (UserModel if user else ModelSpec)(**row['model'])\n"
        "    print(predicted(MemorySpec(**(row | {'model': model, 'device': 'cpu'}))).to_json())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(rows)], capture_output=True, text=True, check=True
    )
    return [Record.from_json(line) for line in done.stdout.splitlines()]


OWN = '''
import torch
from torch import nn
from torch.nn import functional as F

class Tied(nn.Module):
    """Both products contribute to the gradient of one weight."""
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(512, 512))
        nn.init.trunc_normal_(self.weight)
    def forward(self, x):
        return (x @ self.weight @ self.weight).sum()

class Masked(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y[y > 0].sum()

class Attention(nn.Module):
    """Eight query heads share two heads of keys and values, or there is a trainable bias."""
    def __init__(self, biased):
        super().__init__()
        self.q, self.kv = nn.Linear(256, 256), nn.Linear(256, 256 if biased else 64)
        self.bias = nn.Parameter(torch.zeros(1, 8, 512, 512)) if biased else None
    def forward(self, x):
        q, kv = (part(x).unflatten(-1, (-1, 32)).transpose(1, 2) for part in (self.q, self.kv))
        grouped = self.bias is None
        return F.scaled_dot_product_attention(q, kv, kv, self.bias, enable_gqa=grouped).sum()

class Rows(nn.Module):
    """An embedding whose gradient is sparse, used twice, and a bag of its rows."""
    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(1000, 16, sparse=True)
        self.bag = nn.EmbeddingBag(1000, 16, mode="sum", sparse=True)
    def forward(self, x):
        return (self.rows(x).sum(1) + self.rows(x + 1).sum(1) + self.bag(x)).sum()

class Padded(nn.Linear):
    """Pads to the longest length, whose value it reads; or raises for a value that a fake tensor lacks."""
    lengths = None
    def forward(self, x):
        if self.lengths is None:
            if x.sum() > 2 ** 20 or x.sum() < 2:
                raise ValueError("too small")
            return super().forward(x).sum()
        longest = int(self.lengths.max())
        return (super().forward(x)[:, :longest] * torch.ones(2, 5, 1, device=x.device)).sum()

def padded():
    model = Padded(8, 8)
    model.lengths = torch.tensor([5, 3])
    return model, (torch.ones(2, 9, 8),)
def refusing(): return Padded(8, 8), (torch.ones(2, 9, 8),)

class Skipping(nn.Linear):
    """A layer that is skipped with probability zero, as in Whisper."""
    def forward(self, x):
        return (x if torch.rand([]) < 0.0 else super().forward(x)).sum()
def skipping(): return Skipping(64, 64), (torch.ones(2, 64),)

class Forces(nn.Sequential):
    """Forward computes a gradient, of which backward computes the gradient."""
    def forward(self, x):
        x = x.clone().requires_grad_()
        energy = super().forward(x).sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0].pow(2).sum()

class Losses(nn.Linear):
    """Losses whose mean or sum keeps a storage of the input's size, and one whose does not."""
    def forward(self, x):
        y = super().forward(x)
        target = torch.ones_like(y)
        p = y.sigmoid()
        return (F.mse_loss(y, target) + F.smooth_l1_loss(y, target, reduction="sum")
                + F.soft_margin_loss(y, target) + F.binary_cross_entropy(p, target)
                + F.huber_loss(y, target) + F.mse_loss(y, target, reduction="none").mean())
def losses(): return Losses(64, 64), (torch.ones(128, 64),)

def rows(): return {"module": Rows(), "batch": (torch.ones(8, 4, dtype=torch.long),), "optimizer": torch.optim.SGD}
def coalesced(): return rows() | {"optimizer": torch.optim.SparseAdam}
def forces(): return Forces(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1)), (torch.ones(8, 3),)
def tied(): return Tied(), (torch.ones(4, 512),)
def copied():
    layer = nn.TransformerEncoderLayer(64, 2, 128, batch_first=True)
    return nn.TransformerEncoder(layer, 2), (torch.ones(2, 16, 64),)
def masked(): return Masked(32, 32), (torch.ones(8, 32),)
def grouped(): return Attention(False), (torch.ones(2, 512, 256),)
def biased(): return Attention(True), (torch.ones(2, 512, 256),)
def lstm(): return nn.LSTM(64, 128, num_layers=2), (torch.ones(100, 8, 64),)
'''


@pytest.fixture
def own(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)

    def spec(name, **fields):
        optimizer = "adamw" if name in ("rows", "coalesced") else "sgd"  # these have their own
        model = UserModel.read(f"{file}:{name}")
        return dataclasses.replace(SPEC, model=model, optimizer=optimizer, **fields)

    return spec


def test_two_gradients_of_one_weight_are_added_in_place(own):
    spec = own("tied")
    record = measure(spec)
    assert record.median("peak_bytes") == predicted(spec).median("peak_bytes")
    assert 3 <= record.median("peak_bytes") / (512 * 512 * 4) < 3.5  # the weight, two gradients


@pytest.mark.parametrize("name", ["copied", "rows", "forces", "padded", "skipping", "losses"])
def test_unusual_networks_are_predicted_to_the_byte(own, name):
    spec = own(name)
    assert measure(spec).median("peak_bytes") == predicted(spec).median("peak_bytes")


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("masked", "aten.index.Tensor returns a number of elements that depends on the values"),
        (
            "refusing",
            "reads a tensor's value, which a prediction does not have; then came ValueError",
        ),
        ("coalesced", "aten._coalesce.default returns a number of elements that depends"),
        ("lstm", "aten.mkldnn_rnn_layer.default, LSTM on a CPU, keeps a workspace"),
    ],
)
def test_a_measured_row_names_the_operator_that_cannot_be_predicted(own, name, note):
    spec = own(name)
    prediction, record = predicted(spec), measure(spec)
    assert prediction.status == "failed" and note in prediction.note
    table = summary_table([prediction, record])
    (row,) = (dict(zip(table.columns, row, strict=True)) for row in table.rows)
    remark = row["remark"].removeprefix("not predicted: ")
    assert note[:20] in remark and any("peak" in name and row[name] for name in row)


@needs_fake_cuda
def test_kernels_that_exist_only_on_a_gpu_keep_the_same_memory_as_there(own):
    names = ("grouped", "biased", "lstm", "rows")
    specs = [own(name, predict="sm90", precision="bf16") for name in names]
    grouped, biased, lstm, rows = predictions([dataclasses.asdict(spec) for spec in specs])
    scores = 2 * 8 * 512 * 512 * 2
    assert grouped.median("activations_bytes") < scores
    operators = {row[1] for row in biased.tables["savers"][1:]}
    assert "_scaled_dot_product_efficient_attention" in operators  # its bias has a gradient
    # Reserve space: five values per hidden state of each layer, and the outputs between the layers.
    # The layer's output is kept, too.
    assert max(row[-1] for row in lstm.tables["savers"][1:]) == (2 * 5 + 2) * 100 * 8 * 128 * 2
    assert "aten._cudnn_rnn.default, LSTM" in lstm.note and not rows.note
    assert rows.median("gradients_bytes") > (3 * 32 * 16) * 4  # only the rows that were used


@pytest.mark.parametrize("width, is_padded", [(16, False), (12, True)])
def test_flash_attention_pads_only_heads_whose_width_needs_it(width, is_padded):
    """Padding by zero would clone q, k and v, which torch does not do on a GPU."""
    names = set()

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.add(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    q = torch.empty(1, 2, 8, width, device="meta", dtype=torch.bfloat16)
    call = AttentionCall(q, q, q, None, 0.0, causal=True, scale=None, gqa=False)
    with Names():
        backend(call, "sm80")(call)
    assert "_scaled_dot_product_flash_attention" in names
    assert ("constant_pad_nd" in names) == is_padded


def test_attention_that_no_backend_supports_uses_the_math_backend():
    """torch's own function would query the driver, which fails without a GPU."""
    q, kv = torch.randn(2, 8, 5, 16), torch.randn(2, 2, 7, 16)
    mask = torch.rand(5, 7) < 0.8
    mask[:, 0] = True
    call = AttentionCall(q, kv, kv, mask, 0.0, causal=False, scale=None, gqa=True)
    run = backend(call, "sm90")
    expected = F.scaled_dot_product_attention(q, kv, kv, mask, enable_gqa=True)
    torch.testing.assert_close(run(call), expected)
