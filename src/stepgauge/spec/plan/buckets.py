"""Which gradients travel together: computed once as data, executed by parallel and predicted from."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

MB = 10**6
# as torch's DistributedDataParallel: communication starts with the first layers of backward
FIRST_BUCKET_MB = 1.0
MOST_FOR_AN_OWNER = 4  # buckets of a launch, so that none waits for long


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter in a plan. `dtype` and `device` are names that only tell kinds apart."""

    name: str
    numel: int
    bytes_per_value: int = 4
    dtype: str = "float32"
    device: str = "cpu"
    trainable: bool = True

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
    def device(self) -> str:
        return self.parameters[0].device

    @property
    def bytes(self) -> int:
        return sum(parameter.bytes for parameter in self.parameters)


def plan_buckets(
    order_of_use: Iterable[Parameter],
    *,
    cap_mb: float | None,
    first_mb: float | None = None,
    owners: Mapping[str, int] | None = None,
) -> tuple[Bucket, ...]:
    """Buckets, the one that is complete first in front, of parameters in order of first use.

    Gradients come in reverse order of use and are packed until they reach the cap, apart by dtype,
    device and owner. Frozen parameters are left out, and a tied one counts where it is used first:
    its gradient is complete only there.

    cap_mb    where a bucket is closed, in MB of 10^6 bytes: it is less than twice that. A gradient
              of that size travels alone, since packing would copy it. None is no limit
    first_mb  where the first is closed, so that communication starts early
    owners    the rank that the gradient of a name is for; one without a rank is for all

    Raises ValueError for a negative cap.
    """
    cap, first = _limits(cap_mb, first_mb)
    arriving = _arriving(order_of_use)
    open_groups: dict[tuple[str, str, int | None], list[Parameter]] = {}
    closed: list[Bucket] = []

    def close(kind: tuple[str, str, int | None]) -> None:
        closed.append(Bucket(tuple(open_groups.pop(kind)), owner=kind[2]))

    for parameter in arriving:
        kind = (parameter.dtype, parameter.device, (owners or {}).get(parameter.name))
        if parameter.bytes >= cap:
            closed.append(Bucket((parameter,), owner=kind[2]))
            continue
        open_groups.setdefault(kind, []).append(parameter)
        if _bytes(open_groups[kind]) >= (cap if closed else first):
            close(kind)
    for kind in list(open_groups):
        close(kind)
    arrival = {parameter.name: index for index, parameter in enumerate(arriving)}
    return tuple(sorted(closed, key=lambda bucket: max(arrival[name] for name in bucket.names)))


def _arriving(order_of_use: Iterable[Parameter]) -> list[Parameter]:
    """Those with a gradient, in the order in which they get it."""
    by_name: dict[str, Parameter] = {}
    for parameter in order_of_use:
        by_name.setdefault(parameter.name, parameter)
    return [parameter for parameter in reversed(by_name.values()) if parameter.trainable]


def _limits(cap_mb: float | None, first_mb: float | None) -> tuple[float, float]:
    """Bytes at which a bucket is closed, and the first one."""
    for name, value in (("cap_mb", cap_mb), ("first_mb", first_mb)):
        if value is not None and not value >= 0:
            raise ValueError(f"{name} is {value}; it must be at least 0")
    cap = float("inf") if cap_mb is None else cap_mb * MB
    return cap, cap if first_mb is None else min(cap, first_mb * MB)


def plan_launches(buckets: Sequence[Bucket]) -> tuple[range, ...]:
    """Which buckets, by their places in the plan, are sent at once: those for all one by one.

    A bucket for an owner travels towards that rank only. Sent with buckets for the others it leaves
    no direction of the links idle: a launch goes on until it has a bucket for every owner that the
    rest of the plan has one for, or MOST_FOR_AN_OWNER times as many buckets as there are owners. It
    is of one device.
    """
    launches: list[range] = []
    num_owners, start = len({bucket.owner for bucket in buckets}), 0
    for end in range(1, len(buckets) + 1):
        first, following = buckets[start], buckets[end : end + 1]
        if (
            first.owner is None
            or any(bucket.device != first.device for bucket in following)
            or end - start == MOST_FOR_AN_OWNER * num_owners
            or {bucket.owner for bucket in buckets[end:]}
            <= {bucket.owner for bucket in buckets[start:end]}
        ):
            launches.append(range(start, end))
            start = end
    return tuple(launches)


def _bytes(parameters: Sequence[Parameter]) -> int:
    return sum(parameter.bytes for parameter in parameters)
