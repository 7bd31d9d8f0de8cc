// Lets a build of PyTorch without CUDA trace gradients through fake tensors on device "cuda", which then go no further than their shapes.
//
// Autograd asks for a device guard and an accelerator before it runs a node. Loaded with LD_PRELOAD, this library answers for a device that does
// nothing; `pretend_cuda` puts the guard in place. Read in torch 2.13.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <optional>

namespace {

constexpr auto CUDA = c10::DeviceType::CUDA;

struct Guard final : c10::impl::NoOpDeviceGuardImpl<CUDA> {
  c10::Device getDevice() const override { return {CUDA, 0}; }
  c10::Device exchangeDevice(c10::Device) const override { return {CUDA, 0}; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, c10::Device(CUDA, 0)); }
};

struct Hooks final : at::CUDAHooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isAvailable() const override { return true; }
};

Guard guard;
Hooks hooks;

}  // namespace

namespace at::accelerator {
std::optional<c10::DeviceType> getAccelerator(bool) { return CUDA; }
}  // namespace at::accelerator

namespace at::detail {
const CUDAHooksInterface& getCUDAHooks() { return hooks; }
}  // namespace at::detail

extern "C" void pretend_cuda() { c10::impl::device_guard_impl_registry[static_cast<int>(CUDA)].store(&guard); }
