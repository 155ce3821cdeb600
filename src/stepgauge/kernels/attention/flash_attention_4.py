"""Attention by FlashAttention-4 (https://github.com/Dao-AILab/flash-attention, flash_attn/cute), if
the package flash-attn-4 is installed. libraries.py lists the shapes. STEPGAUGE_FA4=0 turns it off.

We call its functions without autograd, whose names are private. torch itself calls the same
functions (torch.nn.attention.activate_flash_attention_impl), but that switches attention for the
whole process. Once torch offers a switch per call, use that instead.
"""

import functools
import importlib.metadata
import os
import warnings

import torch
import torch.nn.functional as F

TITLE = "FlashAttention-4"
PACKAGE, OPT_OUT = "flash-attn-4", "STEPGAUGE_FA4"
BYTES_ALIGNED = 16  # required of the bytes of a head


def is_allowed():
    """True if the package is installed, not turned off, and has not failed to load."""
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
    """Returns the package's module of functions, or warns and returns None if it does not load."""
    try:
        from flash_attn.cute import interface
    except (ImportError, OSError, RuntimeError) as error:
        _load_errors.append(str(error))
        warnings.warn(f"{TITLE} is installed but does not load: {error}", stacklevel=2)
        return None
    return interface


# By kernel variant (each compiles separately): why it fails, or None if it runs.
_failures: dict[tuple, str | None] = {}


def refusal(passes, key, cu_seqlens, q, *others):
    """Returns why FlashAttention-4 cannot run this launch, or None. The first call for a variant
    (pass, type, head width, mask, head group) compiles its kernel, which takes seconds.
    """
    if q.shape[3] * q.element_size() % BYTES_ALIGNED:
        return f"a head of width {q.shape[3]} is no multiple of {BYTES_ALIGNED} bytes"
    if _interface() is None:
        return "the package does not load"
    masks = key.is_causal, key.window > 0, key.is_packed
    variant = passes, key.dtype, q.shape[3], key.group, *masks
    if variant not in _failures:
        _failures[variant] = _failure(passes, key, cu_seqlens, q, *others)
    return _failures[variant]


def _failure(passes, *args):
    """Runs the pass and returns the text of its error, or None."""
    try:
        (forward if passes == "forward" else backward)(*args)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # from its compiler, its assertions, or an older driver
        warnings.warn(f"{TITLE} cannot run this {passes} of attention: {error}", stacklevel=2)
        return str(error)
    return None


def forward(key, cu_seqlens, q, k, v):
    o = _empty_like(q)
    _, lse, *_ = _interface()._flash_attn_fwd(
        *_tokens_first(key, q, k, v), out=_tokens_first(key, o)[0], return_lse=True,
        **_options(key, cu_seqlens),
    )  # fmt: skip
    return o, lse.view(q.shape[:3])


def backward(key, cu_seqlens, q, k, v, do, o, lse):
    grads = [_empty_like(x) for x in (q, k, v)]
    dq, dk, dv = _tokens_first(key, *grads)
    lse = lse[0] if key.is_packed else lse
    _interface()._flash_attn_bwd(
        *_tokens_first(key, q, k, v, o, do.to(q.dtype)), lse, dq=dq, dk=dk, dv=dv,
        **_options(key, cu_seqlens),
    )  # fmt: skip
    return tuple(grads)


def backward_bytes(q, k):
    """Returns the temporary bytes of backward: dq in fp32 with head widths rounded up to 32, two
    numbers per row, and for grouped heads dk and dv in fp32.
    """
    columns = -(-q.shape[3] // 32) * 32
    floats = q[..., 0].numel() * (columns + 2)
    if q.shape[1] != k.shape[1]:
        floats += 2 * k[..., 0].numel() * columns
    return 4 * floats


def _empty_like(x):
    """Like torch.empty_like, but without a stride of 0, which a batch of one may have. The library
    would take it for a broadcast output and raise.
    """
    empty = torch.empty_like(x)
    return empty.as_strided(x.shape, [stride or x.numel() for stride in empty.stride()])


def _tokens_first(key, *tensors):
    """Transposes (B, H, T, D) to the library's order: (B, T, H, D), or (T, H, D) if packed."""
    return [x[0].transpose(0, 1) if key.is_packed else x.transpose(1, 2) for x in tensors]


def _options(key, cu_seqlens):
    """Returns the library's options. A window of W is W - 1 keys to the left and, if not causal, as
    many to the right.
    """
    options = {"softmax_scale": key.scale, "causal": key.is_causal}
    if key.window:
        options["window_size_left"] = key.window - 1
        options["window_size_right"] = 0 if key.is_causal else key.window - 1
    if key.is_packed:  # tokens after the last end form one more sequence
        ends = F.pad(cu_seqlens, (0, 1), value=key.q.shape[2])
        options["cu_seqlens_q"] = options["cu_seqlens_k"] = ends
    return options
