"""``FusedAdamW``: AdamW in one kernel launch for all parameters of a group.

The equations are in reference.py, the design in docs/log/2026-11-21-adamw.md. Without a GPU or
without Triton the optimizer computes the same in plain PyTorch.
"""

import torch
from torch import Tensor
from torch.optim import Optimizer

from stepgauge.kernels.plain_eager import PLAIN_TYPES

from .operator import _tables, kernel_takes, launch, op_options
from .reference import adamw_, state_dtype

__all__ = ["FusedAdamW", "adamw_"]

_STATE = ("exp_avg", "exp_avg_sq", "master_param")  # at least float32, in the parameter's shape


class FusedAdamW(Optimizer):
    """``torch.optim.AdamW`` (arXiv 1711.05101) in one kernel launch per group and pair of types.

    It has the same arguments, parameter groups and state (``step``, ``exp_avg``, ``exp_avg_sq``),
    so that state_dicts can be exchanged in both directions. Differences: the moments of bfloat16
    and float16 parameters are float32, and ``amsgrad``, ``capturable``, ``differentiable`` and
    complex parameters are not supported. ``lr`` may be a tensor, also on the GPU.

    With ``master_weights`` a bfloat16 or float16 parameter has a float32 master in the state
    (``master_param``). The step reads the gradient, the master and the moments, and writes master,
    moments and parameter in one pass. If a parameter is written to between steps (a loaded
    checkpoint, ``nn.init``, clamping), its new values are copied into the master; writes through
    ``.data`` are not detected.

    ``step`` never makes the host wait for the GPU. ``grad_scale`` and ``found_inf``, which
    ``torch.amp.GradScaler`` sets on the optimizer, are read on the device. If the kernel cannot run
    (CPU, float64, parameters that are not dense), the plain PyTorch oracle runs instead.

    Raises ValueError for a hyper-parameter out of range, RuntimeError for a sparse gradient.
    """

    # With this, GradScaler passes its scale and found_inf to step, instead of reading found_inf
    # back.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        master_weights: bool = False,
    ):
        # The keys of a group in torch's AdamW, so that groups can be exchanged.
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": False,
            "maximize": maximize,
            "foreach": None,
            "capturable": False,
            "differentiable": False,
            "fused": True,
            "decoupled_weight_decay": True,
        }
        if master_weights:
            defaults["master_weights"] = True
        self._clear_tables()
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        _check_group(self.param_groups[-1])

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("maximize", False)
            _check_group(group)
        self._clear_tables()

    def _clear_tables(self) -> None:
        self._parts: dict[tuple, _Part] = {}
        self._written: dict = {}  # parameter -> its address and version after the last step

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads a state_dict of this class or of torch.optim.AdamW."""
        super().load_state_dict(state_dict)
        # The base class has cast the moments to the parameter's type; restore them without
        # rounding.
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for saved_id, param in zip(saved_ids, params, strict=True):
            saved = state_dict["state"].get(saved_id, {})
            for name in _STATE:
                if name in saved and state_dtype(param) != param.dtype:
                    value = saved[name].detach().to(param.device, state_dtype(param), copy=True)
                    self.state[param][name] = value

    @torch.no_grad()
    def step(self, closure=None):
        """Makes one optimizer step and returns the closure's loss, if there is a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale = {
            "grad_scale": getattr(self, "grad_scale", None),
            "found_inf": getattr(self, "found_inf", None),
        }
        for index, group in enumerate(self.param_groups):
            options = _options(group) | scale
            if group.get("master_weights"):
                self._copy_writes_to_masters(group)
            is_eager = not torch.compiler.is_compiling()
            steady = self._part_of(index, group).steady if is_eager else None
            if steady is not None:
                addresses = steady.addresses(group["params"], self.state)
                if addresses is not None:
                    launch(steady.tables, addresses, steady.dtypes, options)
                    continue
            self._step_group(index, group, options)
            if group.get("master_weights"):
                self._written |= {p: _version(p) for p in group["params"]}
        return loss

    def _copy_writes_to_masters(self, group: dict) -> None:
        """Copies values written to a parameter since the last step into its master."""
        for param in group["params"]:
            master = self.state.get(param, {}).get("master_param")
            if master is not None and self._written.get(param) != _version(param):
                # Where the parameter is unchanged, the master keeps its full precision.
                wide = param.to(master.dtype)
                master.copy_(torch.where(master.to(param.dtype) == param, master, wide))
                self._written[param] = _version(param)

    def _part_of(self, index: int, group: dict) -> "_Part":
        """Returns what is kept of these parameters. A sharded optimizer steps with some parameters of a
        group after others: each part is known by its first parameter that is updated.
        """
        key = index, next((p for p in group["params"] if p.grad is not None), None)
        if key not in self._parts:
            self._parts = {old: part for old, part in self._parts.items() if old[1] in self.state}
            self._parts[key] = _Part()
        return self._parts[key]

    def _step_group(self, index: int, group: dict, options: dict) -> None:
        buckets = self._buckets(group)
        if torch.compiler.is_compiling():
            for rows in buckets.values():
                _run_operator(rows, options)
            return
        part = self._part_of(index, group)
        for key, rows in buckets.items():
            self._update(part, key, rows, options)
        part.steady = None
        if len(buckets) == 1:
            ((key, rows),) = buckets.items()
            if key[-1] and all(type(p) in PLAIN_TYPES for p in group["params"]):
                part.steady = _SteadyPart(part.tables_of(key, rows[0]), rows, self.state)

    def _buckets(self, group: dict) -> dict[tuple, tuple[list[Tensor], ...]]:
        """Groups the tensors of parameters with a gradient into buckets for one launch each."""
        buckets: dict[tuple, tuple[list[Tensor], ...]] = {}
        for param in group["params"]:
            grad = param.grad
            if grad is None:
                continue
            if grad.layout is not torch.strided:
                raise RuntimeError(
                    f"FusedAdamW takes dense gradients, got a sparse one ({grad.layout})"
                )
            state = self.state[param]
            _init_state(state, param, with_master=group.get("master_weights", False))
            held = [name for name in _STATE if name in state]
            # Of a DTensor the local shard is updated.
            p, g, *kept = (_local(t) for t in (param, grad, *(state[name] for name in held)))
            on_kernel = kernel_takes(p, g)
            if on_kernel:
                if g.stride() != p.stride():
                    g = torch.empty_like(p, dtype=g.dtype).copy_(g)
                kept = [_in_layout(state, name, t, p) for name, t in zip(held, kept, strict=True)]
            step = _step_on(state, p.device if on_kernel else None)
            key = (p.device, p.dtype, g.dtype, len(held), on_kernel)
            columns = (p, g, *kept[:2], step, *kept[2:])
            rows = buckets.setdefault(key, tuple([] for _ in columns))
            for row, tensor in zip(rows, columns, strict=True):
                row.append(tensor)
        return buckets

    def _update(self, part: "_Part", key: tuple, rows: tuple, options: dict) -> None:
        _, param_dtype, grad_dtype, _, on_kernel = key
        # Fake tensors have no addresses.
        if not on_kernel or type(rows[0][0]) not in PLAIN_TYPES:
            _run_operator(rows, options)
            return
        tables = part.tables_of(key, rows[0])
        launch(tables, _tables.addresses_of(*rows), (param_dtype, grad_dtype), options)


def _run_operator(rows: tuple, options: dict) -> None:
    lists = rows if len(rows) == 6 else (*rows, [])
    torch.ops.stepgauge.adamw_(*lists, **op_options(options))


class _Part:
    """What is kept from step to step of parameters that are updated in one call.

    steady  the part at its last step, if it was one launch
    """

    def __init__(self):
        self.steady: _SteadyPart | None = None
        self._tables: dict = {}  # bucket -> numbers of elements, tables

    def tables_of(self, key: tuple, params: list[Tensor]):
        """Returns the tables for these sizes; to build them takes the host 1 to 5 ms."""
        numels = tuple(p.numel() for p in params)
        if key not in self._tables or self._tables[key][0] != numels:
            device, param_dtype, *_ = key
            chunk = _tables.shape_for(param_dtype).chunk
            self._tables[key] = numels, _tables.Tables(list(numels), device, chunk=chunk)
        return self._tables[key][1]


class _SteadyPart:
    """A part at the last step, whose parameters were all updated in one launch.

    In training usually only the gradients' addresses change from step to step. Checking this is
    several times cheaper than grouping the parameters again.
    """

    def __init__(self, tables, rows: tuple[list[Tensor], ...], all_state: dict):
        self.tables = tables
        self.dtypes = (rows[0][0].dtype, rows[1][0].dtype)
        self._entries = []
        for p in rows[0]:
            state = all_state[p]
            held = [(name, state[name], state[name].data_ptr()) for name in state]
            if p.is_contiguous():
                self._entries.append((p, p.data_ptr(), state, held))
        self._tail = _tables.addresses_of(*rows[2:])

    def addresses(self, params: list[Tensor], all_state: dict) -> list[int] | None:
        """Returns the rows of the address table, or None if anything but gradient addresses
        changed.
        """
        params = [p for p in params if p.grad is not None]
        if len(params) != len(self._entries):
            return None
        grad_dtype = self.dtypes[1]
        param_row, grad_row = [], []
        for param, entry in zip(params, self._entries, strict=True):
            p, address, state, held = entry
            grad = param.grad
            if (
                param is not p
                or param.data_ptr() != address
                or grad.dtype is not grad_dtype
                or not grad.is_contiguous()
                or type(grad) is not Tensor
                or all_state.get(param) is not state
                or any(state.get(name) is not t or t.data_ptr() != at for name, t, at in held)
            ):
                return None
            param_row.append(address)
            grad_row.append(grad.data_ptr())
        return param_row + grad_row + self._tail


def _options(group: dict) -> dict:
    beta1, beta2 = group["betas"]
    return {
        "lr": group["lr"],
        "beta1": float(beta1),
        "beta2": float(beta2),
        "eps": group["eps"],
        "weight_decay": group["weight_decay"],
        "maximize": group["maximize"],
    }


def _init_state(state: dict, param: Tensor, *, with_master: bool) -> None:
    """Adds the missing entries of a parameter's state."""
    if "step" not in state:
        # A float32 scalar on the parameter's device, as in torch's fused AdamW: so the device can
        # leave it unchanged when a step is skipped (found_inf).
        state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(
                param, dtype=state_dtype(param), memory_format=torch.preserve_format
            )
    if with_master and state_dtype(param) != param.dtype and "master_param" not in state:
        state["master_param"] = param.detach().to(state_dtype(param))


def _version(param: Tensor) -> tuple[int, int]:
    """Returns a value that changes if the parameter is written to or moved to other memory."""
    local = _local(param)
    return local.data_ptr(), local._version


def _step_on(state: dict, device: torch.device | None) -> Tensor:
    """Makes the state's step a float32 tensor, on the device if one is given, and returns it."""
    step = state["step"]
    if not isinstance(step, Tensor):
        step = state["step"] = torch.tensor(float(step), dtype=torch.float32)
    if step.dtype != torch.float32 or (device is not None and step.device != device):
        step = state["step"] = step.to(device or step.device, torch.float32, non_blocking=True)
    return step


def _in_layout(state: dict, name: str, old: Tensor, param: Tensor) -> Tensor:
    """Returns the state's tensor in float32 with the parameter's strides; a new one replaces it in
    the state.
    """
    if old.dtype == torch.float32 and old.stride() == param.stride() and old.device == param.device:
        return old
    new = torch.empty_like(param, dtype=torch.float32).copy_(old)
    if old is not state[name]:
        raise ValueError(f"{name} of a distributed parameter must be float32, local and dense")
    state[name] = new
    return new


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _check_group(group: dict) -> None:
    beta1, beta2 = group["betas"]
    if not isinstance(group["lr"], Tensor) and not group["lr"] >= 0:
        raise ValueError(f"lr must be at least 0, got {group['lr']}")
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        if not 0 <= beta < 1:
            raise ValueError(f"{name} must be in [0, 1), got {beta}")
    for name in ("eps", "weight_decay"):
        if not group[name] >= 0:
            raise ValueError(f"{name} must be at least 0, got {group[name]}")
    if group.get("amsgrad"):
        raise ValueError("amsgrad=True is not supported, only False")
    if not group.get("decoupled_weight_decay", True):
        raise ValueError("decoupled_weight_decay=False (Adam) is not supported, only True (AdamW)")
    for param in group["params"]:
        if param.is_complex():
            raise ValueError(f"parameters must be real floating-point tensors, got {param.dtype}")
