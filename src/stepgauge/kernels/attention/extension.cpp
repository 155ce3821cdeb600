// Attention's launches without Python's part: for eager mode with the autograd node, and for the
// custom operators, which torch.compile calls, without it.
//
// Python plans, compiles and hands over what it launched (registering.h); what is kept, and how it is
// launched: programs.h.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "module.h"
#include "programs.h"
#include "registering.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/utils/wrap_outputs.h>

#include <cmath>
#include <optional>
#include <tuple>

namespace {

using torch::autograd::utils::wrap;
using torch::autograd::variable_list;

// ---- the two passes: whether there is a program for them, and running it ------------------------

// Whether the kernels read the tensor as it lies.
bool readable(const Tensor& t, const Tensor& q) {
  return t.dim() == 4 && t.stride(3) == 1 && t.scalar_type() == q.scalar_type() &&
      by_address(t, q);
}

struct Inputs {
  Tensor q, k, v;

  bool readable() const {
    return ::readable(q, q) && ::readable(k, q) && ::readable(v, q) && k.sizes() == v.sizes() &&
        on_current_device(q);
  }
};

const Program* forward_program(const Inputs& in, bool is_causal, double scale) {
  if (!nobody_looks_on() || !in.readable()) return nullptr;
  return find({in.q, in.k, in.v, is_causal, scale});
}

std::tuple<Tensor, Tensor> run_forward(const Inputs& in, const Program& program) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  Tensor o = at::empty_like(in.q);
  Tensor lse = at::empty(in.q.sizes().slice(0, 3), in.q.options().dtype(at::kFloat));
  Tensors tensors{in.q, in.k, in.v, o, lse};
  run(program, tensors);
  return {o, lse};
}

struct Saved : Inputs {
  Tensor o, lse;

  bool readable() const {
    return Inputs::readable() && ::readable(o, q) && o.sizes() == q.sizes() &&
        by_address(lse, q) && lse.is_contiguous() && lse.scalar_type() == at::kFloat &&
        lse.sizes() == q.sizes().slice(0, 3);
  }
};

// `grad` is made contiguous where the kernels could not read it as it lies.
const Program* backward_program(Tensor& grad, const Saved& saved, bool is_causal, double scale) {
  if (!nobody_looks_on() || !saved.readable() || grad.sizes() != saved.q.sizes()) return nullptr;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (grad.stride(3) != 1) grad = grad.contiguous();
  if (!readable(grad, saved.q)) return nullptr;
  return find({saved.q, saved.k, saved.v, is_causal, scale, &grad, &saved.o});
}

std::tuple<Tensor, Tensor, Tensor> run_backward(
    const Tensor& grad, const Saved& saved, const Program& program) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto& [q, k, v] = static_cast<const Inputs&>(saved);
  Tensor dq = at::empty_like(q), dk = at::empty_like(k), dv = at::empty_like(v);
  Tensors tensors{grad, q, k, v, saved.o, saved.lse, at::empty_like(saved.lse), dq, dk, dv};
  run(program, tensors);
  return {dq, dk, dv};
}

// ---- the autograd node ------------------------------------------------------------------------

// What the launches by address cannot do. Python offers a program for the next call like it.
std::tuple<Tensor, Tensor, Tensor> backward_operator(
    const Tensor& grad, const Saved& saved, bool is_causal, double scale) {
  using Signature = std::tuple<Tensor, Tensor, Tensor>(
      const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
      bool, double, int64_t, const std::optional<Tensor>&);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("stepgauge::flash_attention_backward", "")
                             .typed<Signature>();
  return op.call(
      grad, saved.q, saved.k, saved.v, saved.o, saved.lse, is_causal, scale, /*window=*/0,
      /*spans=*/std::nullopt);
}

struct Attention : torch::autograd::Function<Attention> {
  static variable_list forward(
      torch::autograd::AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
      bool is_causal, double scale, const Program* program) {
    auto [o, lse] = run_forward({q, k, v}, *program);
    ctx->save_for_backward({q, k, v, o, lse});
    ctx->saved_data["is_causal"] = is_causal;
    ctx->saved_data["scale"] = scale;
    return {o};
  }

  static variable_list backward(torch::autograd::AutogradContext* ctx, variable_list gradients) {
    Tensor grad = gradients[0];
    const auto kept = ctx->get_saved_variables();
    const Saved saved{{kept[0], kept[1], kept[2]}, kept[3], kept[4]};
    const bool is_causal = ctx->saved_data["is_causal"].toBool();
    const double scale = ctx->saved_data["scale"].toDouble();
    // With create_graph the operator is called: it refuses a second derivative.
    const Program* program = at::GradMode::is_enabled()
        ? nullptr
        : backward_program(grad, saved, is_causal, scale);
    auto [dq, dk, dv] = program ? run_backward(grad, saved, *program)
                                : backward_operator(grad, saved, is_causal, scale);
    return {dq, dk, dv, Tensor(), Tensor(), Tensor()};
  }
};

// ---- what Python calls ------------------------------------------------------------------------

// Under autocast the types must be as it would make them.
bool autocast_is_content(const Tensor& q) {
  const auto device = q.device().type();
  return !at::autocast::is_autocast_enabled(device) ||
      at::autocast::get_autocast_dtype(device) == q.scalar_type();
}

// The arguments of all three begin alike: so many tensors of no subclass, the mask's flag, the scale.
bool begin_well(PyObject* const* args, Py_ssize_t num_tensors) {
  for (Py_ssize_t i = 0; i < num_tensors; ++i) {
    if (!THPVariable_CheckExact(args[i])) return false;
  }
  return PyBool_Check(args[num_tensors]) &&
      (args[num_tensors + 1] == Py_None || PyFloat_CheckExact(args[num_tensors + 1]));
}

Inputs inputs_of(PyObject* const* args) {
  return {
      THPVariable_Unpack(args[0]), THPVariable_Unpack(args[1]), THPVariable_Unpack(args[2])};
}

double scale_of(PyObject* given, const Tensor& q) {
  if (given != Py_None) return PyFloat_AS_DOUBLE(given);
  return std::pow(static_cast<double>(q.sizes().empty() ? 1 : q.sizes().back()), -0.5);
}

// attention(q, k, v, is_causal, scale): o, or None when Python must do it.
PyObject* serve(PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 5 || !begin_well(args, 3)) Py_RETURN_NONE;
  const Inputs in = inputs_of(args);
  const bool is_causal = args[3] == Py_True;
  const double scale = scale_of(args[4], in.q);
  if (!autocast_is_content(in.q)) Py_RETURN_NONE;
  const Program* program = forward_program(in, is_causal, scale);
  if (!program) Py_RETURN_NONE;
  const bool needs_gradient = at::GradMode::is_enabled() &&
      (in.q.requires_grad() || in.k.requires_grad() || in.v.requires_grad());
  if (!needs_gradient) return THPVariable_Wrap(std::get<0>(run_forward(in, *program)));
  return THPVariable_Wrap(Attention::apply(in.q, in.k, in.v, is_causal, scale, program)[0]);
  END_HANDLE_TH_ERRORS
}

// forward(q, k, v, is_causal, scale): (o, lse) without an autograd node, or None.
PyObject* serve_forward(PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 5 || !begin_well(args, 3)) Py_RETURN_NONE;
  const Inputs in = inputs_of(args);
  const Program* program = forward_program(in, args[3] == Py_True, scale_of(args[4], in.q));
  if (!program) Py_RETURN_NONE;
  return wrap(run_forward(in, *program));
  END_HANDLE_TH_ERRORS
}

// backward(grad, q, k, v, o, lse, is_causal, scale): (dq, dk, dv) without a node, or None.
PyObject* serve_backward(PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 8 || !begin_well(args, 6)) Py_RETURN_NONE;
  Tensor grad = THPVariable_Unpack(args[0]);
  const Saved saved{inputs_of(args + 1), THPVariable_Unpack(args[4]), THPVariable_Unpack(args[5])};
  const Program* program =
      backward_program(grad, saved, args[6] == Py_True, scale_of(args[7], saved.q));
  if (!program) Py_RETURN_NONE;
  return wrap(run_backward(grad, saved, *program));
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    serving<serve>("attention"),
    serving<serve_forward>("forward"),
    serving<serve_backward>("backward"),
    {"calls", py_calls, METH_NOARGS, nullptr},
    {"configure", py_configure, METH_VARARGS, nullptr},
    {"moved", py_moved, METH_VARARGS, nullptr},
    {"register", py_register, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

PyMODINIT_FUNC PyInit_stepgauge_attention() {
  return module_of("stepgauge_attention", methods);
}
