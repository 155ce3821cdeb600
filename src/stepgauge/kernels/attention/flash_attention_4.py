"""Attention by FlashAttention-4 (https://github.com/Dao-AILab/flash-attention, flash_attn/cute), where
the package flash-attn-4 is installed; libraries.py says for which shapes.

Its functions without autograd have private names. They are those that torch's own registration of it
calls (torch.nn.attention.activate_flash_attention_impl), which changes torch's attention for the
whole process: the way out, once it can be asked for one call. STEPGAUGE_FA4=0 leaves it out.
"""

import functools
import importlib.metadata
import os
import warnings

import torch
import torch.nn.functional as F

TITLE = "FlashAttention-4"
PACKAGE, OPT_OUT = "flash-attn-4", "STEPGAUGE_FA4"
BYTES_ALIGNED = 16  # of a head and of an address


def is_allowed():
    """Whether it is there and not left out; from the first launch on that tried, whether it loads."""
    return os.environ.get(OPT_OUT) != "0" and is_installed() and not _load_errors


@functools.cache
def is_installed():
    try:
        importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


_load_errors: list[str] = []


@functools.cache
def _interface():
    """Its functions; None, with a warning, where they do not load."""
    try:
        from flash_attn.cute import interface
    except (ImportError, OSError, RuntimeError) as error:
        _load_errors.append(str(error))
        warnings.warn(f"{TITLE} is installed and does not load: {error}", stacklevel=2)
        return None
    return interface


# By what it compiles separately: why it does not run, or None where it does.
_found: dict[tuple, str | None] = {}


def refusal(passes, key, cu_seqlens, q, *others):
    """Why it does not take the tensors, or None. Its kernels are compiled here, once a process and
    width, mask and group of heads: for seconds.
    """
    if q.shape[3] * q.element_size() % BYTES_ALIGNED:
        return f"heads of {q.shape[3]} numbers are no multiple of {BYTES_ALIGNED} bytes"
    if _interface() is None:
        return "it does not load"
    compiled = (
        passes,
        key.dtype,
        q.shape[3],
        key.is_causal,
        key.group,
        key.window > 0,
        key.is_packed,
    )
    if compiled not in _found:
        _found[compiled] = _failure(passes, key, cu_seqlens, q, *others)
    return _found[compiled]


def _failure(passes, *given):
    try:
        (forward if passes == "forward" else backward)(*given)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of its compiler, of its assertions, of a driver older than both
        warnings.warn(f"{TITLE} does not run this {passes} of attention: {error}", stacklevel=2)
        return str(error)
    return None


def forward(key, cu_seqlens, q, k, v):
    o = _empty_like(q)
    _, lse, *_ = _interface()._flash_attn_fwd(
        *_as_there(key, q, k, v), out=_as_there(key, o)[0], return_lse=True, **_options(key, cu_seqlens)
    )  # fmt: skip
    return o, lse.view(q.shape[:3])


def backward(key, cu_seqlens, q, k, v, do, o, lse):
    grads = [_empty_like(x) for x in (q, k, v)]
    dq, dk, dv = _as_there(key, *grads)
    lse = lse[0] if key.is_packed else lse
    _interface()._flash_attn_bwd(
        *_as_there(key, q, k, v, o, do.to(q.dtype)), lse, dq=dq, dk=dk, dv=dv,
        **_options(key, cu_seqlens),
    )  # fmt: skip
    return tuple(grads)


def backward_bytes(q, k):
    """dq in fp32, heads in steps of 32; two numbers a row; of grouped heads dk and dv likewise."""
    columns = -(-q.shape[3] // 32) * 32
    floats = q[..., 0].numel() * (columns + 2)
    if q.shape[1] != k.shape[1]:
        floats += 2 * k[..., 0].numel() * columns
    return 4 * floats


def _empty_like(x):
    """Of a batch of one, torch.empty_like keeps a stride of 0, which the library takes for an output
    that is broadcast, and refuses.
    """
    empty = torch.empty_like(x)
    return empty.as_strided(x.shape, [stride or x.numel() for stride in empty.stride()])


def _as_there(key, *tensors):
    """(B, H, T, D) as the library has it: (B, T, H, D), or (T, H, D) of packed sequences."""
    return [x[0].transpose(0, 1) if key.is_packed else x.transpose(1, 2) for x in tensors]


def _options(key, cu_seqlens):
    """A window of W is W - 1 keys to the left, and as many to the right where it is not causal."""
    options = {"softmax_scale": key.scale, "causal": key.is_causal}
    if key.window:
        options["window_size_left"] = key.window - 1
        options["window_size_right"] = 0 if key.is_causal else key.window - 1
    if key.is_packed:  # tokens after the last end are a sequence of their own
        ends = F.pad(cu_seqlens, (0, 1), value=key.q.shape[2])
        options["cu_seqlens_q"] = options["cu_seqlens_k"] = ends
    return options
