"""The specs by the kind of record that they lead to, so that a record from before a field was added
still pairs.
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
# Of nested specs: the one that names the same network.
NETWORKS: Mapping[str, type] = {
    "": ModelSpec,
    BertSpec.network: BertSpec,
    UserModel.network: UserModel,
}
NESTED: Mapping[str, Mapping[str, type]] = {"model": NETWORKS}


# Fields that there are no more, and the value that means what is done today. A record with that
# value pairs with today's; one with another value keeps the field.
RETIRED: Mapping[str, Mapping[str, Any]] = {
    DataParallelSpec.kind: {"transport": "collectives", "max_ctas": 0},
    TrainSpec.kind: {"transport": "collectives", "tokenizer": "bytes"},
    **{kind: {"own": ""} for kind in (ProfileSpec.kind, MemorySpec.kind, DtypesSpec.kind)},
}

# Metrics that have another name today.
RENAMED_METRICS: Mapping[str, str] = {
    "silent_step_ms": "without_communication_ms",
    **{f"{axis}_silent_ms": f"without_{axis}_ms" for axis in ("data", "context", "tensor")},
}


def completed(kind: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """The spec of a record with today's defaults for the fields that it does not have, and without
    those that there are no more.

    A new field's default must therefore mean what was done before there was the field, or its
    records must be of a new kind.
    """
    if kind not in SPECS:
        return dict(spec)
    retired = RETIRED.get(kind, {})
    kept = {n: v for n, v in spec.items() if n not in retired or v != retired[n]}
    return _with_defaults(SPECS[kind], kept)


def declarations(kind: str, spec: Mapping[str, Any]) -> list[type]:
    """The spec of that kind, and the nested ones that the values are of; none for an unknown kind."""
    if kind not in SPECS:
        return []
    return [
        SPECS[kind],
        *(declared for name, value in spec.items() if (declared := _nested(name, value))),
    ]


def _nested(name: str, value: Any) -> type | None:
    """The spec of a nested value; None where it is none, or a network we do not know."""
    return (
        NESTED[name].get(value.get("network", ""))
        if name in NESTED and isinstance(value, Mapping)
        else None
    )


def _with_defaults(declared: type, values: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {
        field.name: field.default
        for field in dataclasses.fields(declared)
        if field.default is not dataclasses.MISSING
    }
    inner = {
        name: _with_defaults(nested, value)
        for name, value in values.items()
        if (nested := _nested(name, value))
    }
    return {**defaults, **values, **inner}
