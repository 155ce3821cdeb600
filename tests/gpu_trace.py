"""Traces of a GPU written by hand, event by event as torch.profiler writes them, so that every
figure is known.
"""

import contextlib
import json


class GpuTrace:
    """A host with a clock that the test advances, and a device that runs kernels in order a stream,
    at 10 µs a launch.

    `launch(name, us)` asks for a kernel now; it starts when its stream is free, at least 2 µs
    later.
    """

    def __init__(self, rank=0):
        self.events, self.rank, self.now = [], rank, 1000.0
        self.free, self.correlation, self.thread = {}, 0, 100

    def event(self, name, category, start, end, tid=None, pid=1, **arguments):
        self.events.append({
            "ph": "X", "cat": category, "name": name, "pid": pid, "tid": self.thread if tid is None else tid,
            "ts": start, "dur": end - start, "args": arguments,
        })  # fmt: skip

    @contextlib.contextmanager
    def call(self, name, category="cpu_op", **arguments):
        # outer before inner, as the profiler writes them
        self.event(name, category, self.now, self.now, **arguments)
        event = self.events[-1]
        yield
        event["dur"] = self.now - event["ts"]

    def range(self, name):
        return self.call(name, "user_annotation")

    def op(self, name, dims=(), type="float", sequence=None, backward=False, values=()):
        arguments = (
            {"Input Dims": [list(d) for d in dims], "Input type": [type] * len(dims)}
            if dims
            else {}
        )
        if values:
            arguments["Concrete Inputs"] = list(values)
        if sequence is not None:
            arguments |= {"Sequence number": sequence, "Fwd thread id": int(backward)}
        return self.call(name, **arguments)

    @contextlib.contextmanager
    def backward_of(self, name, sequence):
        """What the autograd engine runs on its own thread."""
        self.thread += 1
        with (
            self.op(
                f"autograd::engine::evaluate_function: {name}", sequence=sequence, backward=True
            ),
            self.op(name, sequence=sequence, backward=True),
        ):
            yield
        self.thread -= 1

    def launch(self, name, us, stream=7, category="kernel"):
        self.correlation += 1
        with self.call("cudaLaunchKernel", "cuda_runtime", correlation=self.correlation):
            asked, self.now = self.now, self.now + 10
        start = max(self.free.get(stream, 0.0), asked + 2)
        self.free[stream] = start + us
        self.event(name, category, start, start + us, tid=stream, pid=0, stream=stream, device=0,
                   correlation=self.correlation)  # fmt: skip
        return start, start + us

    def synchronize(self):
        with self.call("cudaDeviceSynchronize", "cuda_runtime"):
            self.now = max([self.now, *self.free.values()])

    def text(self):
        return json.dumps(
            {
                "schemaVersion": 1,
                "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}],
                "distributedInfo": {"backend": "nccl", "rank": self.rank, "world_size": 2},
                "displayTimeUnit": "ms",
                "traceEvents": [
                    {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
                    *self.events,
                ],
                "traceName": "a/trace.json",
            },
            indent=1,
        )

    def write(self, path):
        path.write_text(self.text())
        return path


GEMM = "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x128>(Params)"
SOFTMAX = (
    "void (anonymous namespace)::cunn_SoftMaxForward<4, float, float>(float*, float const*, int)"
)
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ADAM = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>(int)"


def step(trace, number=0, communicates=True):
    """Forward of one block (matmul 100 µs, softmax 50), backward (matmul 200), all-reduce (150),
    AdamW (60).
    """
    with trace.range(f"ProfilerStep#{number}"):
        with trace.range("forward"), trace.range("blocks.0"), trace.range("blocks.0.attention"):
            with (
                trace.range("scores"),
                trace.op("aten::mm", [(64, 32), (32, 16)], sequence=10 * number),
            ):
                trace.launch(GEMM, 100)
            with (
                trace.range("softmax"),
                trace.op("aten::_softmax", [(64, 16)], sequence=10 * number + 1),
            ):
                trace.launch(SOFTMAX, 50)
        with trace.range("backward"):
            with (
                trace.backward_of("MmBackward0", 10 * number),
                trace.op("aten::mm", [(32, 64), (64, 16)]),
            ):
                trace.launch(GEMM, 200)
            if communicates:
                # Begins on its own stream while the backward's product runs: 150 µs, some of it
                # hidden.
                with trace.op("c10d::allreduce_"):
                    trace.free[20] = trace.free[7] - 60
                    trace.launch(NCCL, 150, stream=20)
        trace.synchronize()
        with (
            trace.range("optimizer"),
            trace.range("Optimizer.step#AdamW.step"),
            trace.op("aten::_fused_adamw_"),
        ):
            trace.launch(ADAM, 60)
        trace.synchronize()
        trace.now += 40
