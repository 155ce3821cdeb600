"""AdamW in one launch for all parameters of a group: ``FusedAdamW``.

The equations stand in reference.py; docs/kernels/adamw.md has the design. Without a GPU or without
Triton the optimizer computes the same with plain PyTorch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from .reference import adamw_, state_dtype

try:
    from . import tables as _tables
except ImportError:  # No Triton: the reference serves.
    _tables = None

__all__ = ["FusedAdamW", "adamw_", "fused_adamw_"]

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


class FusedAdamW(Optimizer):
    """``torch.optim.AdamW`` (arXiv 1711.05101) in one kernel launch a group and pair of types.

    The same arguments, parameter groups and state (``step``, ``exp_avg``, ``exp_avg_sq``), so
    that state_dicts go either way. What differs: the moments of bfloat16 and float16 parameters
    are float32, and ``amsgrad``, ``capturable``, ``differentiable`` and complex parameters are not
    offered. ``lr`` may be a tensor, also on the GPU.

    ``step`` never makes the host wait for the GPU. ``grad_scale`` and ``found_inf``, which
    ``torch.amp.GradScaler`` sets on it, are read on the device. Where the kernel does not apply
    (CPU, float64, a parameter with holes) the oracle in plain PyTorch runs instead.

    Raises ValueError for a hyper-parameter out of range, RuntimeError for a sparse gradient.
    """

    # GradScaler then passes its scale and its verdict instead of reading the verdict back.
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
    ):
        # The keys that torch's own AdamW keeps in a group, so that its groups and ours exchange.
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
        self._forget_tables()
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        _check_group(self.param_groups[-1])

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("maximize", False)
            _check_group(group)
        self._forget_tables()

    def _forget_tables(self) -> None:
        self._tables_by_bucket: dict = {}
        self._steady_groups: dict = {}

    def load_state_dict(self, state_dict: dict) -> None:
        """Load a state_dict of this class or of torch.optim.AdamW."""
        super().load_state_dict(state_dict)
        # The base class has cast the moments to the parameter's type; take them in full instead.
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for saved_id, param in zip(saved_ids, params, strict=True):
            saved = state_dict["state"].get(saved_id, {})
            for name in ("exp_avg", "exp_avg_sq"):
                if name in saved and state_dtype(param) != param.dtype:
                    value = saved[name].detach().to(param.device, state_dtype(param), copy=True)
                    self.state[param][name] = value

    @torch.no_grad()
    def step(self, closure=None):
        """Take one step; return the closure's loss, if there is a closure."""
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
            steady = self._steady_groups.get(index)
            if steady is not None and not torch.compiler.is_compiling():
                addresses = steady.addresses(group["params"], self.state)
                if addresses is not None:
                    _launch(steady.tables, addresses, steady.dtypes, options)
                    continue
            self._step_group(index, group, options)
        return loss

    def _step_group(self, index: int, group: dict, options: dict) -> None:
        buckets = self._buckets(group)
        for key, rows in buckets.items():
            self._update(index, key, rows, options)
        self._steady_groups.pop(index, None)
        if len(buckets) == 1 and not torch.compiler.is_compiling():
            ((key, rows),) = buckets.items()
            if key[-1] and all(type(p) in _PLAIN_TYPES for p in group["params"]):
                tables = self._tables_by_bucket[index, key][1]
                self._steady_groups[index] = _SteadyGroup(tables, rows, self.state)

    def _buckets(self, group: dict) -> dict[tuple, tuple[list[Tensor], ...]]:
        """Sort tensors with a gradient by what one launch can take together."""
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
            if not state:
                _init_state(state, param)
            # A DTensor's update is its local shard's.
            tensors = [_local(t) for t in (param, grad, state["exp_avg"], state["exp_avg_sq"])]
            on_kernel = _kernel_takes(tensors[0], tensors[1])
            if on_kernel:
                tensors = _same_layout(state, tensors)
            step = _step_on(state, tensors[0].device if on_kernel else None)
            p, g = tensors[0], tensors[1]
            key = (p.device, p.dtype, g.dtype, on_kernel)
            if key not in buckets:
                buckets[key] = ([], [], [], [], [])
            for row, tensor in zip(buckets[key], (*tensors, step), strict=True):
                row.append(tensor)
        return buckets

    def _update(self, group_index: int, key: tuple, rows: tuple, options: dict) -> None:
        device, param_dtype, grad_dtype, on_kernel = key
        # Fake tensors have no addresses to launch with.
        has_addresses = type(rows[0][0]) in _PLAIN_TYPES
        if not on_kernel or not has_addresses or torch.compiler.is_compiling():
            torch.ops.stepgauge.adamw_(*rows, **_op_options(options))
            return
        numels = tuple(p.numel() for p in rows[0])
        entry = self._tables_by_bucket.get((group_index, key))
        if entry is None or entry[0] != numels:
            chunk = _tables.shape_for(param_dtype).chunk
            entry = (numels, _tables.Tables(list(numels), device, chunk=chunk))
            self._tables_by_bucket[group_index, key] = entry
        _launch(entry[1], _tables.addresses_of(*rows), (param_dtype, grad_dtype), options)


class _SteadyGroup:
    """A group as the last step saw it: all parameters in one launch, in their own layout.

    In training nothing but the gradients' addresses changes from step to step. Checking that is
    several times cheaper than sorting the parameters again.
    """

    def __init__(self, tables, rows: tuple[list[Tensor], ...], all_state: dict):
        self.tables = tables
        self.dtypes = (rows[0][0].dtype, rows[1][0].dtype)
        self._entries = [
            (p, p.data_ptr(), all_state[p], m, m.data_ptr(), v, v.data_ptr(), s)
            for p, _, m, v, s in zip(*rows, strict=True)
            if p.is_contiguous()
        ]
        self._tail = _tables.addresses_of(*rows[2:])

    def addresses(self, params: list[Tensor], all_state: dict) -> list[int] | None:
        """The address table's rows, or None when something else changed."""
        params = [p for p in params if p.grad is not None]
        if len(params) != len(self._entries):
            return None
        grad_dtype = self.dtypes[1]
        param_row, grad_row = [], []
        for param, entry in zip(params, self._entries, strict=True):
            p, address, state, m, m_address, v, v_address, s = entry
            grad = param.grad
            if (
                param is not p
                or param.data_ptr() != address
                or grad.dtype is not grad_dtype
                or not grad.is_contiguous()
                or type(grad) is not Tensor
                or all_state.get(param) is not state
                or state.get("exp_avg") is not m
                or m.data_ptr() != m_address
                or state.get("exp_avg_sq") is not v
                or v.data_ptr() != v_address
                or state.get("step") is not s
            ):
                return None
            param_row.append(address)
            grad_row.append(grad.data_ptr())
        return param_row + grad_row + self._tail


def fused_adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float | Tensor,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Update lists of tensors of one device and type in place: the operator stepgauge::adamw_."""
    options = {
        "lr": lr, "beta1": betas[0], "beta2": betas[1], "eps": eps, "weight_decay": weight_decay,
        "maximize": maximize, "grad_scale": grad_scale, "found_inf": found_inf,
    }  # fmt: skip
    lists = [list(row) for row in (params, grads, exp_avgs, exp_avg_sqs, steps)]
    torch.ops.stepgauge.adamw_(*lists, **_op_options(options))


@torch.library.custom_op(
    "stepgauge::adamw_",
    mutates_args=("params", "grads", "exp_avgs", "exp_avg_sqs", "steps"),
)
def _adamw_op(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    lr: float,
    lr_tensor: Tensor | None,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    options = {
        "lr": lr if lr_tensor is None else lr_tensor, "beta1": beta1, "beta2": beta2, "eps": eps,
        "weight_decay": weight_decay, "maximize": maximize, "grad_scale": grad_scale, "found_inf": found_inf,
    }  # fmt: skip
    rows = (params, grads, exp_avgs, exp_avg_sqs, steps)
    columns = list(zip(*rows, strict=True))
    types = {(p.device, p.dtype, g.dtype) for p, g in zip(params, grads, strict=True)}
    if len(types) == 1 and all(_ready_for_kernel(*column) for column in columns):
        chunk = _tables.shape_for(params[0].dtype).chunk
        tables = _tables.Tables([p.numel() for p in params], params[0].device, chunk=chunk)
        dtypes = (params[0].dtype, grads[0].dtype)
        _launch(tables, _tables.addresses_of(*rows), dtypes, options)
        return
    for column in columns:
        adamw_(*column, **options)


@_adamw_op.register_fake
def _(*args, **kwargs) -> None:
    return None


def _launch(tables, addresses: list[int], dtypes: tuple, options: dict) -> None:
    device = tables.device
    options = dict(options)
    for name in ("lr", "grad_scale", "found_inf"):
        if isinstance(options[name], Tensor) and options[name].device != device:
            # A CPU learning rate is a number; the others move without the host waiting.
            value = options[name]
            on_host = name == "lr" and value.device.type == "cpu"
            options[name] = value.item() if on_host else value.to(device, non_blocking=True)
    args = (tables, addresses, *dtypes)
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _tables.launch(*args, **options)
    else:
        _tables.launch(*args, **options)


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


def _op_options(options: dict) -> dict:
    lr = options["lr"]
    is_tensor = isinstance(lr, Tensor)
    return options | {"lr": 0.0 if is_tensor else lr, "lr_tensor": lr if is_tensor else None}


def _init_state(state: dict, param: Tensor) -> None:
    # As torch's fused AdamW keeps it: a float32 scalar beside the parameter, so that a skipped
    # step (found_inf) is not counted without the host's knowing.
    state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
    for name in ("exp_avg", "exp_avg_sq"):
        state[name] = torch.zeros_like(
            param, dtype=state_dtype(param), memory_format=torch.preserve_format
        )


def _step_on(state: dict, device: torch.device | None) -> Tensor:
    """The state's step as a float32 tensor, on the device if one is asked for; kept in the state."""
    step = state["step"]
    if not isinstance(step, Tensor):
        step = state["step"] = torch.tensor(float(step), dtype=torch.float32)
    if step.dtype != torch.float32 or (device is not None and step.device != device):
        step = state["step"] = step.to(device or step.device, torch.float32, non_blocking=True)
    return step


def _same_layout(state: dict, tensors: list[Tensor]) -> list[Tensor]:
    """Give the gradient and the moments the parameter's strides, and the moments float32."""
    param, grad, *moments = tensors
    if grad.stride() != param.stride():
        grad = torch.empty_like(param, dtype=grad.dtype).copy_(grad)
    for i, name in enumerate(("exp_avg", "exp_avg_sq")):
        old = moments[i]
        if (
            old.dtype != torch.float32
            or old.stride() != param.stride()
            or old.device != param.device
        ):
            new = torch.empty_like(param, dtype=torch.float32).copy_(old)
            if old is not state[name]:
                raise ValueError(
                    f"{name} of a distributed parameter must be float32, local and dense"
                )
            moments[i] = state[name] = new
    return [param, grad, *moments]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _on_kernel_device(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _kernel_takes(param: Tensor, grad: Tensor) -> bool:
    return (
        _tables is not None
        and _on_kernel_device(param)
        and grad.device == param.device
        and param.dtype in _KERNEL_DTYPES
        and grad.dtype in _KERNEL_DTYPES
        and (param.is_contiguous() or _dense(param))
    )


def _ready_for_kernel(param, grad, exp_avg, exp_avg_sq, step) -> bool:
    return (
        _kernel_takes(param, grad)
        and exp_avg.dtype == exp_avg_sq.dtype == step.dtype == torch.float32
        and grad.stride() == exp_avg.stride() == exp_avg_sq.stride() == param.stride()
        and step.device == param.device
    )


def _dense(tensor: Tensor) -> bool:
    """Whether the elements fill one stretch of memory, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


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
