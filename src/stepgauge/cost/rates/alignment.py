"""Products whose rows do not start at multiples of 16 bytes, for which cuBLAS has much slower kernels.

On an H200, bf16 products with 50,257 words run at 95 to 150 TFLOP/s, with 50,258 or 50,260 at 240 to 290,
and with 50,264 at 700 (docs/log/2026-11-30-larger-grids.md). fp32 products do not differ.
"""

import math
from collections.abc import Sequence

from stepgauge.cost.operations.terms import BF16_PRODUCTS, WEIGHT_GRADIENT
from stepgauge.spec.calibration import ALIGNED, ALIGNMENTS


def with_alignment(operation: str, sizes: Sequence[float]) -> str:
    """Returns the name under which such a product is calibrated: "matmul 2-byte nt bf16".

    Aligned products and all other operations keep their name.
    """
    if operation not in BF16_PRODUCTS:
        return operation
    m, n, k = (int(size) for size in sizes)
    # The lengths of the rows of both factors and of the result; tokens are not among them.
    length = math.gcd(n, m if operation == WEIGHT_GRADIENT else k)
    word = ALIGNMENTS.get(math.gcd(length, ALIGNED), "")
    return operation.replace("matmul ", f"matmul {word}")
