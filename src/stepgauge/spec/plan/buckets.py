"""Which gradients travel together: computed once as data, executed by parallel and predicted from."""

import dataclasses
from collections.abc import Mapping, Sequence

MB = 10**6
# as torch's DistributedDataParallel: communication starts with the first layers of backward
FIRST_BUCKET_MB = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter in a plan. `dtype` and `device` are names that only tell kinds apart."""

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
    """Parameters whose gradients are one message, in the order in which they lie in it.

    owner  the rank that alone receives the average, or None where all do
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
    """Buckets, the one that is complete first in front, of trained parameters in order of use, whose
    gradients come in reverse and are packed until they reach the cap, apart by dtype, device, owner.

    cap_mb    where a bucket is closed, in MB of 10^6 bytes: it is less than twice that. A gradient
              of that size travels alone, since packing would copy it. None is no limit
    first_mb  where the first is closed, so that communication starts early
    owners    the rank that the gradient of a name is for; one without a rank is for all
    alone     a gradient as large as the cap is its own bucket; False: it closes the open one

    Raises ValueError for a negative cap.
    """
    for name, value in (("cap_mb", cap_mb), ("first_mb", first_mb)):
        if value is not None and not value >= 0:
            raise ValueError(f"{name} is {value}; it must be at least 0")
    cap = float("inf") if cap_mb is None else cap_mb * MB
    first = cap if first_mb is None else min(cap, first_mb * MB)
    open_buckets: dict[tuple[str, str, int | None], Bucket] = {}
    closed: list[Bucket] = []
    for parameter in reversed(order_of_use):
        owner = (owners or {}).get(parameter.name)
        kind = (parameter.dtype, parameter.device, owner)
        if alone and parameter.bytes >= cap:
            closed.append(Bucket((parameter,), owner))
            continue
        packed = Bucket((*open_buckets.pop(kind, Bucket(())).parameters, parameter), owner)
        if packed.bytes >= (cap if closed else first):
            closed.append(packed)
        else:
            open_buckets[kind] = packed
    arrival = {parameter.name: place for place, parameter in enumerate(reversed(order_of_use))}
    every = [*closed, *open_buckets.values()]
    return tuple(sorted(every, key=lambda bucket: arrival[bucket.parameters[-1].name]))
