// Lets autograd run on fake CUDA tensors in a torch without a CUDA device. Fake tensors own no memory and run no kernels.
// Autograd needs three things from a device: its existence, switching to it, and events between its streams.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

namespace {

struct FakeHooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

const c10::Device DEVICE(c10::DeviceType::CUDA, 0);
const c10::Stream STREAM(c10::Stream::DEFAULT, DEVICE);

struct FakeGuard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  c10::Stream getStream(c10::Device) const noexcept override { return STREAM; }
  c10::Stream getDefaultStream(c10::Device) const override { return STREAM; }
  c10::Stream getNewStream(c10::Device, int) const override { return STREAM; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return STREAM; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

}  // namespace

extern "C" {

// Replaces torch's guard and hooks for CUDA by ours, or puts torch's back.
void use_fake_cuda(bool fake) {
  static FakeHooks hooks;
  static FakeGuard guard;
  auto& registered = c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)];
  // torch looked up its hooks object when it was imported and keeps it. Neither class has fields, so copying our vtable
  // pointer turns that object into ours.
  static_assert(sizeof(FakeHooks) == sizeof(at::CUDAHooksInterface));
  auto* known = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  static const auto* torchs_guard = registered.load();
  static const void* const torchs_hooks = *reinterpret_cast<void* const*>(known);
  registered.store(fake ? &guard : torchs_guard);
  const void* vtable = fake ? *reinterpret_cast<void* const*>(&hooks) : torchs_hooks;
  std::memcpy(static_cast<void*>(known), &vtable, sizeof(void*));
}

}  // extern "C"
