"""A data parallel step, predicted: the record that `bench data-parallel` would give.

The plan of buckets is the one that the wrapper executes. A bucket is sent when its last gradient is
there; buckets travel one after another, each for the time that its link was measured to take. What
computes beside a collective runs slower meanwhile.
"""

import dataclasses
from collections.abc import Sequence

from stepgauge.cost.machine import ASSUMED, Machine
from stepgauge.cost.operations import StepOperations
from stepgauge.cost.step import HEADINGS, estimate, predict
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.plan.buckets import Bucket, Parameter, plan_buckets
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.step import StepSpec

# How much longer computing takes beside a collective of NCCL: a product beside a spinning block
# took 1.24 of its time, kernels of a backward 1.19 to 1.30 (H100 and H200, NCCL 2.28).
SLOWED = 0.24
FIRST_BUCKET_MB = 1.0  # as the wrapper
MODELLED = ("none", "naive", "flat", "overlapped", "bucketed")
BYTES = {"own": 4, "bf16": 2, "fp16": 2}


@dataclasses.dataclass(frozen=True)
class Piece:
    """Device time of backward, and the parameter whose gradient is complete after it."""

    us: float
    parameter: Parameter | None = None


@dataclasses.dataclass(frozen=True)
class Overlap:
    """When backward and the last bucket end, in microseconds from backward's begin."""

    backward_us: float
    communication_us: float
    end_us: float


def predict_data_parallel(spec: DataParallelSpec, machine: Machine) -> Record:
    """The modelled record. Raises ValueError for what the cost model or the hardware file does not
    know.
    """
    alone = predict(_alone(spec), machine)
    found = _overlap(spec, machine)
    backward_ms = alone.metrics["backward_ms"].median
    waits_ms = max(0.0, (found.end_us - found.backward_us) / 1e3)
    slowed_ms = (found.backward_us - _total(_pieces(spec, machine))) / 1e3
    step_ms = alone.metrics["step_ms"].median + slowed_ms + waits_ms
    tokens = spec.batch * _network(spec).context_length * spec.ranks
    metrics = {
        **alone.metrics,
        "backward_ms": Sample.exact(backward_ms + slowed_ms, "ms"),
        "synchronize_ms": Sample.exact(waits_ms, "ms"),
        "step_ms": Sample.exact(step_ms, "ms"),
        "tokens_per_s": Sample.exact(tokens / step_ms * 1e3, "tokens/s"),
        "communication_ms": Sample.exact(found.communication_us / 1e3, "ms"),
        "silent_step_ms": alone.metrics["step_ms"],
        "exposed_ms": Sample.exact(slowed_ms + waits_ms, "ms"),
    }
    rows = [
        ["backward", "slower beside collectives", "", "", 1, slowed_ms * 1e3, ASSUMED],
        ["synchronize", "communication", "all_reduce", "", 1, waits_ms * 1e3, "calibrated"],
    ]
    return dataclasses.replace(
        alone,
        kind=spec.kind,
        spec=dataclasses.asdict(spec),
        metrics=metrics,
        tables={"terms": [HEADINGS, *alone.tables["terms"][1:], *rows]},
    )


def _network(spec: DataParallelSpec) -> ModelSpec:
    if not isinstance(spec.model, ModelSpec):
        raise ValueError("only presets of the Transformer are predicted")
    return spec.model


def _alone(spec: DataParallelSpec) -> StepSpec:
    """The step of one rank. Raises ValueError for a wrapper that is not modelled."""
    if spec.wrapper not in MODELLED:
        raise ValueError(f"wrapper is {spec.wrapper!r}; predicted are {', '.join(MODELLED)}")
    if spec.compile != "off" and spec.wrapper != "none":
        raise ValueError(
            f"compile is {spec.compile!r}; when a compiled backward gives its gradients is not "
            f"modelled: choose off"
        )
    own = {field.name for field in dataclasses.fields(StepSpec)}
    values = {k: v for k, v in vars(spec).items() if k in own and k not in ("warmup", "steps")}
    return StepSpec(**values)


def _pieces(spec: DataParallelSpec, machine: Machine) -> list[Piece]:
    operations, itemsize = StepOperations(_alone(spec)), BYTES[spec.reduce_dtype]
    pieces = []
    for name, term in operations.backward_order():
        us = term.count * estimate(term, machine).us
        parameter = None
        if term.gradient:
            parameter = Parameter(name=name, numel=term.gradient, bytes_per_value=itemsize)
            if spec.reduce_dtype != "own":  # narrowed and widened, a pass over memory each
                us += 2 * machine.traffic(term.gradient * (4 + itemsize)).us
        pieces.append(Piece(us, parameter))
    return pieces


def _total(pieces: Sequence[Piece]) -> float:
    return sum(piece.us for piece in pieces)


def _overlap(spec: DataParallelSpec, machine: Machine) -> Overlap:
    pieces = _pieces(spec, machine)
    if spec.wrapper == "none" or spec.ranks == 1:
        return Overlap(_total(pieces), 0.0, _total(pieces))
    used = [piece.parameter for piece in reversed(pieces) if piece.parameter]
    caps = {"naive": 0.0, "overlapped": 0.0, "flat": None, "bucketed": spec.bucket_mb}
    first = FIRST_BUCKET_MB if spec.wrapper == "bucketed" else None
    buckets = plan_buckets(used, cap_mb=caps[spec.wrapper], first_mb=first)
    times = [_message_us(bucket, spec, machine) for bucket in buckets]
    if spec.wrapper in ("naive", "flat"):
        backward_us = _total(pieces)
        return Overlap(backward_us, sum(times), backward_us + sum(times))
    return simulate(pieces, buckets, times)


def _message_us(bucket: Bucket, spec: DataParallelSpec, machine: Machine) -> float:
    link = machine.hardware.link(op="all_reduce", backend="nccl", ranks=spec.ranks)
    if link is None:
        raise ValueError(
            f"the hardware file {machine.hardware.name} has no all_reduce between {spec.ranks} "
            f"ranks: stepgauge bench comm and comm fit --hardware give it"
        )
    return link.time_ms(bucket.bytes) * 1e3


def simulate(pieces: Sequence[Piece], buckets: Sequence[Bucket], times: Sequence[float]) -> Overlap:
    """Computing in order, buckets in order as they are complete; what computes while a bucket
    travels takes 1 + SLOWED of its time.
    """
    missing = [len(bucket.parameters) for bucket in buckets]
    bucket_of = {name: i for i, bucket in enumerate(buckets) for name in bucket.names}
    now, sent, travels_until, backward_us = 0.0, 0, 0.0, 0.0

    def launch() -> None:
        nonlocal sent, travels_until
        while sent < len(buckets) and not missing[sent]:
            travels_until = max(now, travels_until) + times[sent]
            sent += 1

    for piece in pieces:
        slowed = min(piece.us * (1 + SLOWED), max(0.0, travels_until - now))
        now += slowed + piece.us - slowed / (1 + SLOWED)
        backward_us = now
        if piece.parameter is not None:
            missing[bucket_of[piece.parameter.name]] -= 1
            launch()
    return Overlap(backward_us, sum(times), max(backward_us, travels_until))
