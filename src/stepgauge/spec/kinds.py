"""Maps each kind of record to its spec, so that older records still pair with new ones.

Older records may lack a field that was added since, or have a field that was removed.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from stepgauge.spec.bert import BertSpec
from stepgauge.spec.blocks import BlocksSpec
from stepgauge.spec.broadcast import BroadcastSpec
from stepgauge.spec.calibration import CalibrationSpec, ContentionSpec
from stepgauge.spec.comm import CommSpec
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.dtypes import AccumulationSpec, DtypesSpec
from stepgauge.spec.kernel import KERNELS
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.memory import MemorySpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.op import OpSpec
from stepgauge.spec.pipeline import PipelineSpec
from stepgauge.spec.profile import ProfileSpec
from stepgauge.spec.step import StepSpec
from stepgauge.spec.train import TrainSpec
from stepgauge.spec.user_model import UserModel

SPECS: Mapping[str, type] = {
    spec.kind: spec
    for spec in (
        StepSpec,
        TrainSpec,
        ProfileSpec,
        MemorySpec,
        DtypesSpec,
        AccumulationSpec,
        CommSpec,
        DataParallelSpec,
        LayoutSpec,
        BroadcastSpec,
        BlocksSpec,
        CalibrationSpec,
        ContentionSpec,
        PipelineSpec,
        OpSpec,
    )
} | KERNELS
# The command that measures each kind of record.
COMMANDS: Mapping[str, str] = {
    StepSpec.kind: "bench step",
    DataParallelSpec.kind: "bench data-parallel",
    LayoutSpec.kind: "bench layout",
    PipelineSpec.kind: "bench pipeline",
    CommSpec.kind: "bench comm",
    BroadcastSpec.kind: "bench broadcast",
    OpSpec.kind: "bench op",
    ProfileSpec.kind: "profile step",
    MemorySpec.kind: "profile memory",
    DtypesSpec.kind: "profile dtypes",
    TrainSpec.kind: "train",
    **{kind: f"bench kernel {kind}" for kind in KERNELS},
}
# The spec of the field `model`, by its own field `network`.
NETWORKS: Mapping[str, type] = {
    "": ModelSpec,
    BertSpec.network: BertSpec,
    UserModel.network: UserModel,
}

# Removed fields, with the value that means what is done today. A record with that value pairs with
# new records; a record with another value keeps the field.
RETIRED: Mapping[str, Mapping[str, Any]] = {
    DataParallelSpec.kind: {"transport": "collectives", "max_ctas": 0},
    TrainSpec.kind: {"transport": "collectives", "tokenizer": "bytes"},
    **{kind: {"own": ""} for kind in (ProfileSpec.kind, MemorySpec.kind, DtypesSpec.kind)},
}

# Metrics by their former names.
RENAMED_METRICS: Mapping[str, str] = {
    "silent_step_ms": "without_communication_ms",
    **{f"{axis}_silent_ms": f"without_{axis}_ms" for axis in ("data", "context", "tensor")},
}


def completed(kind: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a record's spec with defaults for missing fields and without removed fields.

    The default of a new field must therefore mean what was done before the field existed;
    otherwise its records need a new kind.
    """
    if kind not in SPECS:
        return dict(spec)
    retired = RETIRED.get(kind, {})
    kept = {n: v for n, v in spec.items() if n not in retired or v != retired[n]}
    return _with_defaults(SPECS[kind], kept)


def declarations(kind: str, spec: Mapping[str, Any]) -> list[type]:
    """Returns the spec classes of a record: that of its kind and of its network; [] if unknown."""
    if kind not in SPECS:
        return []
    network = _network_of(spec)
    return [SPECS[kind], network] if network else [SPECS[kind]]


def _network_of(spec: Mapping[str, Any]) -> type | None:
    """Returns the class of the spec's network; None if it has none, or an unknown one."""
    model = spec.get("model")
    return NETWORKS.get(model.get("network", "")) if isinstance(model, Mapping) else None


def _with_defaults(declared: type, values: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {
        field.name: field.default
        for field in dataclasses.fields(declared)
        if field.default is not dataclasses.MISSING
    }
    complete = {**defaults, **values}
    if network := _network_of(values):
        complete["model"] = _with_defaults(network, values["model"])
    return complete
