"""Gradient buckets as data: `parallel` executes the plan and `cost` predicts from it."""

import dataclasses
from collections.abc import Mapping, Sequence

MB = 10**6
# A small first bucket, as in DistributedDataParallel, lets communication start early in backward.
FIRST_BUCKET_MB = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter in a plan. `dtype` and `device` are only compared, never interpreted."""

    name: str
    numel: int
    bytes_per_value: int = 4
    dtype: str = "float32"
    device: str = "cpu"

    @property
    def bytes(self) -> int:
        return self.numel * self.bytes_per_value


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are sent as one message, in the order of the message.

    owner  the only rank that receives the average; None: all ranks do
    """

    parameters: tuple[Parameter, ...]
    owner: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(parameter.name for parameter in self.parameters)

    @property
    def bytes(self) -> int:
        return sum(parameter.bytes for parameter in self.parameters)


def plan_buckets(
    order_of_use: Sequence[Parameter],
    *,
    cap_mb: float | None,
    first_mb: float | None = None,
    owners: Mapping[str, int] | None = None,
    alone: bool = True,
) -> tuple[Bucket, ...]:
    """Returns the buckets for trained parameters, the first complete one first. Gradients arrive in
    reverse order of use and are packed until a bucket reaches the cap. Each combination of dtype,
    device and owner has its own buckets.

    cap_mb    size at which a bucket is closed, in MB of 10^6 bytes. None: no limit
    first_mb  size at which the first bucket is closed, so that communication starts early
    owners    name -> the rank that receives the gradient; all ranks receive the others
    alone     gives a gradient of at least the cap its own bucket, since packing would copy it

    Raises ValueError for a negative cap.
    """
    for name, value in (("cap_mb", cap_mb), ("first_mb", first_mb)):
        if value is not None and not value >= 0:
            raise ValueError(f"{name} is {value}; it must be at least 0")
    cap = float("inf") if cap_mb is None else cap_mb * MB
    first_cap = cap if first_mb is None else min(cap, first_mb * MB)
    open_buckets: dict[tuple[str, str, int | None], Bucket] = {}
    closed: list[Bucket] = []
    for parameter in reversed(order_of_use):
        owner = owners.get(parameter.name) if owners else None
        if alone and parameter.bytes >= cap:
            closed.append(Bucket((parameter,), owner))
            continue
        kind = (parameter.dtype, parameter.device, owner)
        packed = Bucket((*open_buckets.pop(kind, Bucket(())).parameters, parameter), owner)
        if packed.bytes >= (cap if closed else first_cap):
            closed.append(packed)
        else:
            open_buckets[kind] = packed
    arrival = {parameter.name: place for place, parameter in enumerate(reversed(order_of_use))}
    closed += open_buckets.values()
    return tuple(sorted(closed, key=lambda bucket: arrival[bucket.parameters[-1].name]))
