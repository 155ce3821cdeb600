// What the eager paths in C++ share: launching Triton's kernels by address.
//
// Nothing of CUDA is included: a kernel is launched through cuLaunchKernel and the stream comes from
// torch's C interface, both given as addresses, so that this builds with any torch and a test can put
// functions of its own in their place.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <cstdint>

namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;

// The driver's cuLaunchKernel, cuCtxSetCurrent, cuTensorMapReplaceAddress, and
// aoti_torch_get_current_cuda_stream of libtorch_cuda, part of torch's stable C interface. All
// return 0 when all is well.
using LaunchKernel = int (*)(
    void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
    void**);
using CurrentStream = int (*)(int32_t, void**);
using SetContext = int (*)(void*);
using ReplaceAddress = int (*)(void*, void*);

constexpr int kInvalidContext = 201;  // CUDA_ERROR_INVALID_CONTEXT
constexpr uintptr_t kAlignment = 16;  // What the compiled kernels take for granted.

LaunchKernel launch_kernel = nullptr;
CurrentStream current_stream = nullptr;
SetContext set_context = nullptr;

struct Kernel {
  void* function = nullptr;
  unsigned threads = 0;
  unsigned shared_bytes = 0;
};

// Whether nothing but eager autograd looks on: no mode, transform, tracer or tensor subclass.
[[maybe_unused]] bool nobody_looks_on() {
  static const DispatchKeySet usual{DispatchKey::BackendSelect, DispatchKey::ADInplaceOrView};
  return (c10::impl::tls_local_dispatch_key_set().included_ - usual).empty();
}

// Whether the kernels can take the tensor by its address.
[[maybe_unused]] bool by_address(const Tensor& t, const Tensor& like) {
  static const DispatchKeySet special{
      DispatchKey::Python,    DispatchKey::PythonTLSSnapshot, DispatchKey::Conjugate,
      DispatchKey::Negative,  DispatchKey::ZeroTensor,        DispatchKey::Functionalize,
      DispatchKey::FuncTorchBatched};
  return (t.key_set() & special).empty() && t.layout() == at::kStrided &&
      t.device() == like.device() &&
      reinterpret_cast<uintptr_t>(t.const_data_ptr()) % kAlignment == 0;
}

[[maybe_unused]] bool on_current_device(const Tensor& x) {
  return x.is_cpu() ||
      c10::impl::getDeviceGuardImpl(x.device().type())->getDevice() == x.device();
}

// `parameters`: addresses of the kernel's arguments. Triton's own hidden ones follow (scratch
// memory, which is not used here): the driver reads as many as the kernel declares.
[[maybe_unused]] void launch_by_address(
    const Kernel& kernel, const unsigned (&grid)[3], void* stream, void* context,
    void** parameters) {
  auto once = [&] {
    return launch_kernel(
        kernel.function, grid[0], grid[1], grid[2], kernel.threads, 1, 1, kernel.shared_bytes,
        stream, parameters, nullptr);
  };
  int status = once();
  if (status == kInvalidContext && set_context && set_context(context) == 0) {
    status = once();  // A thread of the autograd engine that had not touched the GPU yet.
  }
  TORCH_CHECK(status == 0, "cuLaunchKernel failed with CUDA driver error ", status);
}

[[maybe_unused]] void* stream_for(const Tensor& x) {
  void* stream = nullptr;
  const int status = current_stream(x.device().index(), &stream);
  TORCH_CHECK(status == 0, "no current CUDA stream, error ", status);
  return stream;
}

}  // namespace
