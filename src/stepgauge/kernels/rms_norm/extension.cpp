// RMSNorm's eager path without Python: the autograd node and the launches of Triton's kernels.
//
// Python compiles the kernels and hands over, once for each kind of call, their handles and launch
// shapes (extension.py).

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "launch.h"
#include "module.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <tuple>
#include <unordered_map>

namespace {

bool autocast_gives_float32 = false;

struct Plan {
  Kernel forward, backward, reduce;
  int64_t forward_rows = 1;
  int64_t backward_rows = 1, max_programs = 1, splits = 1, reduce_grid = 1;
  bool has_backward = false;
  void* context = nullptr;
};

// Plans are never removed, and never written once they have a backward: the autograd engine's
// threads read them without Python's lock.
std::unordered_map<uint64_t, Plan> plans;

uint64_t plan_key(const Tensor& x, const Tensor& weight, at::ScalarType out_type, bool extra) {
  auto bits = [](auto value, int shift) { return static_cast<uint64_t>(value) << shift; };
  return bits(x.size(-1), 0) | bits(x.scalar_type(), 20) | bits(weight.scalar_type(), 28) |
      bits(out_type, 36) | bits(extra, 44) | bits(x.device().index() + 1, 48);
}

// Whether the kernels can take all of the tensor by its address.
bool whole_by_address(const Tensor& t, const Tensor& like) {
  return t.is_contiguous() && by_address(t, like);
}

// A kernel's parameters in order, zeros after them.
struct Parameters {
  uint64_t values[16] = {};
  void* addresses[16];
  int count = 0;

  Parameters() {
    for (int i = 0; i < 16; ++i) addresses[i] = &values[i];
  }
  void add(const Tensor& t) { values[count++] = reinterpret_cast<uint64_t>(t.const_data_ptr()); }
  void add(int32_t n) { std::memcpy(&values[count++], &n, sizeof n); }
  void add(float v) { std::memcpy(&values[count++], &v, sizeof v); }
};

void launch(
    const Kernel& kernel, const Plan& plan, int64_t grid_x, int64_t grid_y, void* stream,
    Parameters& parameters) {
  const unsigned grid[3] = {static_cast<unsigned>(grid_x), static_cast<unsigned>(grid_y), 1};
  launch_by_address(kernel, grid, stream, plan.context, parameters.addresses);
}

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

struct Results {
  Tensor y, total, rstd;
};

Results run_forward(
    const Tensor& x, const std::optional<Tensor>& residual, const Tensor& weight, double eps,
    at::ScalarType out_type, const Plan& plan) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const int64_t num_rows = x.numel() / x.size(-1);
  Results out;
  out.y = at::empty(x.sizes(), x.options().dtype(out_type));
  if (residual) out.total = at::empty(x.sizes(), x.options());
  out.rstd = at::empty({num_rows}, x.options().dtype(at::kFloat));
  Parameters parameters;
  parameters.add(x);
  if (residual) parameters.add(*residual);
  parameters.add(weight);
  parameters.add(out.y);
  if (residual) parameters.add(out.total);
  parameters.add(out.rstd);
  parameters.add(static_cast<int32_t>(num_rows));
  parameters.add(static_cast<float>(eps));
  launch(plan.forward, plan, ceil_div(num_rows, plan.forward_rows), 1, stream_for(x), parameters);
  return out;
}

std::tuple<Tensor, Tensor> run_backward(
    const Tensor& dy, const Tensor& h, const Tensor& weight, const Tensor& rstd,
    const std::optional<Tensor>& dsum, const Plan& plan) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const int64_t num_rows = rstd.numel();
  const int64_t grid = std::min(plan.max_programs, ceil_div(num_rows, plan.backward_rows));
  auto dx = at::empty(h.sizes(), h.options());
  auto dw = at::empty(weight.sizes(), weight.options());
  auto partial = at::empty({grid, weight.size(0)}, h.options().dtype(at::kFloat));
  void* stream = stream_for(h);
  Parameters parameters;
  for (const Tensor* t : {&dy, &h, &weight, &rstd}) parameters.add(*t);
  if (dsum) parameters.add(*dsum);
  parameters.add(dx);
  parameters.add(partial);
  parameters.add(static_cast<int32_t>(num_rows));
  launch(plan.backward, plan, grid, plan.splits, stream, parameters);
  Parameters sum;
  sum.add(partial);
  sum.add(dw);
  sum.add(static_cast<int32_t>(grid));
  launch(plan.reduce, plan, plan.reduce_grid, 1, stream, sum);
  return {dx, dw};
}

// What the launch by address cannot do, a second derivative's refusal included.
std::tuple<Tensor, Tensor> backward_operator(
    const Tensor& dy, const Tensor& h, const Tensor& weight, const Tensor& rstd,
    const std::optional<Tensor>& dsum) {
  using Signature = std::tuple<Tensor, Tensor>(
      const Tensor&, const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("stepgauge::rms_norm_backward", "")
                             .typed<Signature>();
  return op.call(dy, h, weight, rstd, dsum);
}

struct RMSNorm : torch::autograd::Function<RMSNorm> {
  static torch::autograd::variable_list forward(
      torch::autograd::AutogradContext* ctx, const Tensor& x,
      const std::optional<Tensor>& residual, const Tensor& weight, double eps,
      at::ScalarType out_type, const Plan* plan) {
    auto out = run_forward(x, residual, weight, eps, out_type, *plan);
    ctx->save_for_backward({residual ? out.total : x, weight, out.rstd});
    ctx->saved_data["plan"] = reinterpret_cast<int64_t>(plan);
    if (residual) return {out.y, out.total};
    return {out.y};
  }

  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* ctx, torch::autograd::variable_list gradients) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &h = saved[0], &weight = saved[1], &rstd = saved[2];
    const auto* plan = reinterpret_cast<const Plan*>(ctx->saved_data["plan"].toInt());
    const bool has_residual = gradients.size() > 1;
    const bool plain = !at::GradMode::is_enabled() && nobody_looks_on();
    bool direct = plain && on_current_device(h);
    for (Tensor& gradient : gradients) {
      if (plain) gradient = gradient.contiguous();
      direct = direct && whole_by_address(gradient, h);
    }
    std::optional<Tensor> dsum;
    if (has_residual) dsum = gradients[1];
    const auto [dx, dw] = direct ? run_backward(gradients[0], h, weight, rstd, dsum, *plan)
                                 : backward_operator(gradients[0], h, weight, rstd, dsum);
    return {dx, has_residual ? dx : Tensor(), dw, Tensor(), Tensor(), Tensor()};
  }
};

// rms_norm(x, weight, eps, residual): the result, or None when Python must do it.
PyObject* serve(PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  const bool has_residual = count == 4 && args[3] != Py_None;
  if (count != 4 || !THPVariable_CheckExact(args[0]) || !THPVariable_CheckExact(args[1]) ||
      (has_residual && !THPVariable_CheckExact(args[3])) || !nobody_looks_on()) {
    Py_RETURN_NONE;
  }
  const double eps = PyFloat_AsDouble(args[2]);
  if (eps == -1.0 && PyErr_Occurred()) return nullptr;
  const Tensor& x = THPVariable_Unpack(args[0]);
  const Tensor& weight = THPVariable_Unpack(args[1]);
  if (x.dim() == 0 || weight.dim() != 1 || weight.size(0) != x.size(-1) || x.numel() == 0 ||
      x.numel() / x.size(-1) > std::numeric_limits<int32_t>::max() || !whole_by_address(x, x) ||
      !whole_by_address(weight, x) || !on_current_device(x)) {
    Py_RETURN_NONE;
  }
  std::optional<Tensor> residual;
  if (has_residual) {
    residual = THPVariable_Unpack(args[3]);
    if (residual->sizes() != x.sizes() || residual->scalar_type() != x.scalar_type() ||
        !whole_by_address(*residual, x)) {
      Py_RETURN_NONE;
    }
  }
  auto out_type = x.scalar_type();
  if (autocast_gives_float32 && x.is_cuda() &&
      !c10::impl::tls_is_dispatch_key_excluded(DispatchKey::AutocastCUDA)) {
    out_type = at::kFloat;
  }
  const auto found = plans.find(plan_key(x, weight, out_type, has_residual));
  if (found == plans.end()) Py_RETURN_NONE;
  const Plan& plan = found->second;
  const bool needs_gradient = at::GradMode::is_enabled() &&
      (x.requires_grad() || weight.requires_grad() || (residual && residual->requires_grad()));
  Tensor y, total;
  if (!needs_gradient) {
    auto out = run_forward(x, residual, weight, eps, out_type, plan);
    y = std::move(out.y);
    total = std::move(out.total);
  } else if (plan.has_backward) {
    auto out = RMSNorm::apply(x, residual, weight, eps, out_type, &plan);
    y = std::move(out[0]);
    if (has_residual) total = std::move(out[1]);
  } else {
    Py_RETURN_NONE;
  }
  if (!has_residual) return THPVariable_Wrap(std::move(y));
  THPObjectPtr first(THPVariable_Wrap(std::move(y))), second(THPVariable_Wrap(std::move(total)));
  return first && second ? PyTuple_Pack(2, first.get(), second.get()) : nullptr;
  END_HANDLE_TH_ERRORS
}

// configure(cuLaunchKernel, current_stream, cuCtxSetCurrent, autocast_gives_float32)
PyObject* py_configure(PyObject*, PyObject* args) {
  unsigned long long launch, stream, context;
  int float32;
  if (!PyArg_ParseTuple(args, "KKKp", &launch, &stream, &context, &float32)) return nullptr;
  launch_kernel = reinterpret_cast<LaunchKernel>(launch);
  current_stream = reinterpret_cast<CurrentStream>(stream);
  set_context = reinterpret_cast<SetContext>(context);
  autocast_gives_float32 = float32;
  Py_RETURN_NONE;
}

// register(x, weight, y, has_residual, context, forward, backward): tensors show the kind of call.
// forward: (function, threads, shared, rows). backward: None or ((function, threads, shared),
// rows, max_programs, splits, (function, threads, shared), reduce_grid).
PyObject* py_register(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *x, *weight, *y, *backward;
  int extra;
  unsigned long long context, forward_function, backward_function, reduce_function;
  Plan plan;
  if (!PyArg_ParseTuple(
          args, "OOOpK(KIIL)O", &x, &weight, &y, &extra, &context, &forward_function,
          &plan.forward.threads, &plan.forward.shared_bytes, &plan.forward_rows, &backward)) {
    return nullptr;
  }
  TORCH_CHECK_TYPE(
      THPVariable_Check(x) && THPVariable_Check(weight) && THPVariable_Check(y),
      "register takes three tensors first");
  plan.forward.function = reinterpret_cast<void*>(forward_function);
  plan.context = reinterpret_cast<void*>(context);
  if (backward != Py_None) {
    if (!PyArg_ParseTuple(
            backward, "(KII)LLL(KII)L", &backward_function, &plan.backward.threads,
            &plan.backward.shared_bytes, &plan.backward_rows, &plan.max_programs, &plan.splits,
            &reduce_function, &plan.reduce.threads, &plan.reduce.shared_bytes,
            &plan.reduce_grid)) {
      return nullptr;
    }
    plan.backward.function = reinterpret_cast<void*>(backward_function);
    plan.reduce.function = reinterpret_cast<void*>(reduce_function);
    plan.has_backward = true;
  }
  const auto key = plan_key(
      THPVariable_Unpack(x), THPVariable_Unpack(weight), THPVariable_Unpack(y).scalar_type(),
      extra);
  Plan& kept = plans[key];
  if (!kept.has_backward) kept = plan;
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    serving<serve>("rms_norm"),
    {"calls", py_calls, METH_NOARGS, nullptr},
    {"configure", py_configure, METH_VARARGS, nullptr},
    {"register", py_register, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

PyMODINIT_FUNC PyInit_stepgauge_rms_norm() {
  return module_of("stepgauge_rms_norm", methods);
}
