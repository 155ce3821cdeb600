"""Times the products of tensor parallel, whole and in the pieces in which they overlap.

    python benchmarks/piece_products.py           # about 20 s on a GPU
    python benchmarks/piece_products.py --small   # on a CPU, to check that it runs

A rank of 2 or 4 multiplies the tokens of 1 to 8 sequences with its part of a weight of a network
4096 wide. Appends a JSON line per product to $OUT/piece_products.jsonl: microseconds of one product of
all rows, of one per piece, and of one for the own piece and one or two for the others. Pieces of several
sequences are batched products in our layers; "positions" is a product of the same piece stored with
positions before sequences, which needs no batch.
"""

import argparse
import functools
import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from stepgauge.calibrate.timing import time_of

WIDTH, FEATURES = 4096, 11_008


def products(ranks: int, small: bool) -> dict[str, tuple[int, int]]:
    """Returns inputs and outputs of each product."""
    d, f = (64, 96) if small else (WIDTH, FEATURES)
    return {
        "qkv": (d, 3 * d // ranks),
        "gate_up": (d, 2 * f // ranks),
        "output": (d // ranks, d),
        "down": (f // ranks, d),
    }


def batched(x_BTK: Tensor, weight_KM: Tensor, y_BTM: Tensor, cuts: list[int]) -> None:
    """Multiplies consecutive parts of the sequence; `cuts` are their lengths."""
    weight_BKM, first = weight_KM.expand(len(x_BTK), -1, -1), 0
    for length in cuts:
        rows = slice(first, first + length)
        torch.bmm(x_BTK[:, rows], weight_BKM, out=y_BTM[:, rows])
        first += length


def positions_first(x_TBK: Tensor, weight_KM: Tensor, y_TBM: Tensor, cuts: list[int]) -> None:
    """The same with positions before sequences: each part is contiguous."""
    first = 0
    for length in cuts:
        rows = slice(first, first + length)
        torch.mm(x_TBK[rows].flatten(0, 1), weight_KM, out=y_TBM[rows].flatten(0, 1))
        first += length


def make(
    multiply: Callable[..., None], shape: tuple[int, int], sizes: tuple[int, int],
    cuts: list[int], device: torch.device,
) -> Callable[[], None]:  # fmt: skip
    """Returns a call of the product. The weight is stored as (outputs, inputs), as in forward."""
    inputs, outputs = sizes
    normal = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)
    x, y = normal(*shape, inputs), normal(*shape, outputs)
    return functools.partial(multiply, x, normal(outputs, inputs).t(), y, cuts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="small sizes, on a CPU")
    arguments = parser.parse_args()
    device = torch.device("cpu" if arguments.small else "cuda")
    path = Path(os.environ.get("OUT", ".")) / "piece_products.jsonl"
    length = 64 if arguments.small else 8192
    for ranks, batch in ((2, 1), (4, 1), (4, 4), (4, 8)):
        tokens = length if batch == 1 else length // 2
        piece = tokens // ranks
        cuts = {
            "whole": [tokens],
            "pieces": [piece] * ranks,
            "groups": [piece, piece, 2 * piece] if ranks == 4 else [piece] * 2,
            "own, rest": [piece, tokens - piece],
        }
        for name, sizes in products(ranks, arguments.small).items():
            row: dict[str, object] = {"ranks": ranks, "batch": batch, "tokens": tokens}
            row |= {"product": name, "sizes": sizes}
            ways = [("batched", batched, (batch, tokens))]
            if batch > 1:
                ways.append(("positions", positions_first, (tokens, batch)))
            for way, multiply, shape in ways:
                for cut, parts in cuts.items():
                    call = functools.partial(make, multiply, shape, sizes, parts, device)
                    row[f"{way} {cut}"] = time_of(call, device, 1 if arguments.small else 20).us
            with path.open("a") as file:
                file.write(json.dumps({**row, "torch": torch.__version__}) + "\n")
            print(row, flush=True)


if __name__ == "__main__":
    main()
