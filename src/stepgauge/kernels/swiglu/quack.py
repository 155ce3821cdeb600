"""SwiGLU's gate fused into the epilogues of the matrix products before and after it, by QuACK
(https://github.com/Dao-AILab/quack), which is installed with FlashAttention-4.

If the inner dimension of a product is short, QuACK's kernels with the gate take less time than
cuBLAS's without it, because one warpgroup multiplies while the other writes. The tiles below were
the fastest of eleven at 16,384 x 1600 x 6400 (docs/log/2026-11-23-hopper-steps.md).
"""

import contextlib
import functools
import importlib
import importlib.util

import torch
from torch import Tensor

PACKAGE, COMPILER = "quack-kernels", "nvidia-cutlass-dsl"
HOPPER = 9  # major compute capability; the tiles are for its kernels
FORWARD_TILE, BACKWARD_TILE = (128, 192), (128, 128)


@functools.cache
def require(device: torch.device) -> None:
    """Raises ValueError if QuACK cannot run on that GPU, or not as it is installed."""
    if importlib.util.find_spec("quack") is None:
        raise ValueError(f"gate is 'quack', which needs the package {PACKAGE}")
    if torch.cuda.get_device_capability(device)[0] != HOPPER:
        raise ValueError("gate is 'quack', whose kernels are for Hopper GPUs: choose torch")
    _require_keys()


def _require_keys() -> None:
    """Raises ValueError if QuACK cannot compute the keys of its compiled kernels.

    A key covers the sources of all functions that a kernel calls, except those of installed
    packages, which QuACK recognises by the name of their folder: elsewhere the compiler's own
    functions are included, and their global variables have no key.
    """
    try:
        with contextlib.suppress(ModuleNotFoundError):  # older releases have no keys
            importlib.import_module("quack.epilogue.library")
    except TypeError as error:
        raise ValueError(
            f"gate is 'quack', but {PACKAGE} cannot compute the keys of its kernels; this happens if "
            f"{COMPILER} is not in a folder called site-packages, where pip installs it"
        ) from error


def product(x_MD: Tensor, weight_FD: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the product with a weight of gate's rows followed by up's, its columns interleaved, and
    y (M, F).
    """
    require(x_MD.device)
    from quack.gemm_interface import gemm_act

    return gemm_act(
        x_MD, weight_FD.T, activation="swiglu", concat_layout=("B",), **_with_tile(FORWARD_TILE)
    )


def product_backward(dy_MD: Tensor, weight_DF: Tensor, gate_up_MF: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradient of gate and up, interleaved, from the gradient of the layer's output, and
    y, recomputed.
    """
    from quack.gemm_interface import gemm_dact

    return gemm_dact(
        dy_MD, weight_DF, gate_up_MF, activation="swiglu", dynamic_scheduler=False,
        **_with_tile(BACKWARD_TILE),
    )  # fmt: skip


@functools.cache
def _with_tile(tile: tuple[int, int]) -> dict:
    from quack.gemm_config import GemmConfig

    rows, columns = tile
    config = GemmConfig(
        tile_m=rows, tile_n=columns, pingpong=True, cluster_m=2, cluster_n=1,
        is_dynamic_persistent=False, device_capacity=HOPPER,
    )  # fmt: skip
    return {"config": config, "tuned": False}
