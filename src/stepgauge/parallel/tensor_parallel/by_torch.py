"""torch's own tensor parallel from the same tables, to compare with: parallelize_module with column
and row parallel layers, SequenceParallel norms and loss_parallel.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from stepgauge.parallel.data_axis import gathered
from stepgauge.spec.plan.tensor import Rule, Table, matched

STREAM = Shard(1)  # the residual stream, cut by sequence


def parallelize_by_torch(module: nn.Module, table: Table, mesh: DeviceMesh) -> None:
    """Cuts the module's layers in place, as the table says. Parameters become DTensors with the values
    of rank 0. All ranks of the mesh must call it.

    The rows of a fused layer are reordered first, so that each rank gets its part of every section.
    The parent of a head computes its loss without whole logits.

    Raises ValueError for sections that are not a multiple of the ranks.
    """
    rules = list(matched(table, [name for name, _ in module.named_modules()]))
    for name, rule in rules:
        if rule.sections:
            _order_by_rank(module.get_submodule(name), rule, mesh)
    plan = {name: STYLES[rule.kind] for name, rule in rules if rule.kind in STYLES}
    parallelize_module(module, mesh, plan)
    for name, rule in rules:
        if rule.kind == "head":
            _use_loss_parallel(module.get_submodule(name.rpartition(".")[0]), name)


# The embedding returns a piece of the stream, so no module needs the rule split.
STYLES: Mapping[str, ParallelStyle] = {
    "column": ColwiseParallel(input_layouts=STREAM),
    "row": RowwiseParallel(output_layouts=STREAM),
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=STREAM),
    "sequence": SequenceParallel(use_local_output=True),
    "head": ColwiseParallel(input_layouts=STREAM, use_local_output=False),
}


@torch.no_grad()
def _order_by_rank(layer: Any, rule: Rule, mesh: DeviceMesh) -> None:
    """Reorders the rows of a fused layer so that N equal parts are the ranks' parts."""
    ranks = mesh.size()
    for section in rule.sections:
        if section.copies(ranks) > 1:
            raise ValueError(
                f"{section.rows} rows are shared by several of {ranks} ranks; torch would cut them"
            )
    for parameter in layer.parameters(recurse=False):
        cut = rule.cut_of("weight", parameter.shape)
        assert cut is not None, "a rule with sections cuts the weight"
        rows = []
        for rank in range(ranks):
            rows += [parameter[part] for part in cut.parts(len(parameter), rank, ranks)]
        parameter.copy_(torch.cat(rows))
    layer.sections = tuple(section.rows // ranks for section in rule.sections)


def _use_loss_parallel(parent: Any, head: str) -> None:
    """Replaces the parent's loss by the mean loss of logits that are cut over ranks. torch's operators
    for it are enabled in forward, and in backward from the loss to the logits only.
    """
    layer = parent.get_submodule(head.rpartition(".")[2])

    def compute_loss(x_BQD: Tensor, _: Tensor, targets_BT: Tensor) -> Tensor:
        logits_BTV = layer(x_BQD)
        with loss_parallel():
            loss = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
        if loss.requires_grad:
            backward = contextlib.ExitStack()
            loss.register_hook(lambda _: backward.enter_context(loss_parallel()))
            logits_BTV.register_hook(lambda _: backward.close())
        return gathered(loss)

    parent.compute_loss = compute_loss
