"""Keeps a GPU busy for a moment, so that the host is ahead of it when the timed work begins."""

import torch

WIDTH, SECONDS = 4096, 2e-4  # of a product, and roughly its time on a GPU
MOST_PRODUCTS = 128  # a GPU queues about a thousand launches before the host has to wait


def keep_busy(device: torch.device, seconds: float) -> None:
    """Launches products that take a GPU about this long, with few launches; does nothing on a CPU.
    Products, because copies take little power: the clock would be higher than in a step.

    Their memory is freed before they have run. That is safe: on the same stream, later work that
    reuses the memory runs after them.
    """
    products = min(MOST_PRODUCTS, round(seconds / SECONDS))
    if device.type == "cuda" and products:
        left, right = torch.randn((2, WIDTH, WIDTH), dtype=torch.bfloat16, device=device)
        for _ in range(products):
            torch.mm(left, right)
