"""Networks of few blocks, timed as a whole."""

from stepgauge.calibrate import blocks as calibrated
from stepgauge.calibrate.blocks import run, with_blocks
from stepgauge.spec.blocks import LAYERS, BlocksSpec, TimedBlocks, blocks_of, operation_of
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.layout import Layout
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.record import Record
from stepgauge.spec.step import TRAINING_PHASES, StepSpec

MODEL = ModelSpec(d_model=32, d_ff=64, num_heads=2, vocab_size=64, context_length=16, num_layers=9)


def test_timed_blocks_are_stored_in_the_file_under_the_name_of_the_step(tmp_path, monkeypatch):
    for name, few in (("WARMUP", 1), ("STEPS", 1)):
        monkeypatch.setattr(calibrated, name, few)
    step = StepSpec(model=MODEL, batch=2, checkpointing="blocks")
    (blocks,) = blocks_of(step)
    record = Record.from_json(run(blocks).to_json())
    with_blocks(HardwareFile(name="here"), [record]).write(tmp_path / "here.json")
    file = HardwareFile.read(tmp_path / "here.json")
    table = file.operations[operation_of(step, Layout())]
    assert {row[0] for row in table.rows} == set(LAYERS) and all(row[-1] > 0 for row in table.rows)
    timed = TimedBlocks(table)
    for phase in TRAINING_PHASES:
        few = timed.outside_us(phase, "device") + LAYERS[0] * timed.block_us(phase, "device")
        assert few >= timed.outside_us(phase, "device") >= 0
    assert isinstance(blocks, BlocksSpec) and blocks.model.num_layers == max(LAYERS)
    other = StepSpec(model=MODEL, batch=2)
    assert operation_of(other, Layout()) not in file.operations
