// Attention's eager path without Python: the autograd node and the launches of Triton's kernels.
//
// Python plans and compiles, and hands over for each kind of call (shapes, strides, types, mask,
// scale) what it then launches: per kernel the handle, the grid and every argument, which is a
// constant, the address of a tensor, or a copy descriptor of a tensor, whose bytes Triton made and
// in which only the address changes (extension.py).

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "launch.h"
#include "module.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <cmath>
#include <cstring>
#include <mutex>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace {

using Tensors = std::vector<Tensor>;
using torch::autograd::variable_list;

constexpr size_t kDescriptorBytes = 128;   // CUtensorMap
constexpr size_t kMaxParameters = 120;     // Triton's hidden ones included
constexpr size_t kMaxDescriptors = 8;

ReplaceAddress replace_address = nullptr;

enum class Kind : long { constant = 0, address = 1, descriptor = 2 };

struct Parameter {
  Kind kind;
  uint64_t word = 0;          // of a constant
  size_t tensor = 0;          // of an address or descriptor
  int64_t offset_bytes = 0;   // of an address
  std::array<unsigned char, kDescriptorBytes> descriptor{};
};

struct Step {
  Kernel kernel;
  unsigned grid[3] = {1, 1, 1};
  std::vector<Parameter> parameters;
};

struct Program {
  std::vector<int64_t> scratch;  // floats of each temporary, numbered after the tensors given
  std::vector<Step> steps;
  void* context = nullptr;
};

// ---- which program ----------------------------------------------------------------------------

// device, type, mask, scale, then q's, k's and dO's sizes or strides as they are needed.
using Key = std::array<int64_t, 33>;

struct Hash {
  size_t operator()(const Key& key) const {
    uint64_t hash = 14695981039346656037ull;
    for (int64_t value : key) {
      hash = (hash ^ static_cast<uint64_t>(value)) * 1099511628211ull;
      hash ^= hash >> 29;
    }
    return hash;
  }
};

Key key_of(
    const Tensor& q, const Tensor& k, const Tensor& v, bool is_causal, double scale,
    const Tensor* grad) {
  Key key{};
  size_t at = 0;
  key[at++] = q.is_cpu() ? -1 : q.device().index();
  key[at++] = static_cast<int64_t>(q.scalar_type());
  key[at++] = is_causal + 2 * (grad != nullptr);
  std::memcpy(&key[at++], &scale, sizeof scale);
  auto add = [&](at::IntArrayRef values) {
    for (int64_t value : values) key[at++] = value;
  };
  for (at::IntArrayRef values : {q.sizes(), q.strides(), k.sizes(), k.strides(), v.strides()}) {
    add(values);
  }
  if (grad) add(grad->strides());
  return key;
}

// Programs are never removed or changed. The autograd engine's threads look for theirs without
// Python's lock.
std::unordered_map<Key, Program, Hash> programs;
std::mutex programs_lock;

const Program* find(const Key& key) {
  const std::lock_guard<std::mutex> held(programs_lock);
  const auto found = programs.find(key);
  return found == programs.end() ? nullptr : &found->second;
}

// ---- running it -------------------------------------------------------------------------------

void move_descriptor(void* descriptor, const void* address) {
  const int status = replace_address(descriptor, const_cast<void*>(address));
  TORCH_CHECK(status == 0, "cuTensorMapReplaceAddress failed with CUDA driver error ", status);
}

void launch(const Step& step, void* context, const Tensors& tensors, void* stream) {
  alignas(64) unsigned char descriptors[kMaxDescriptors][kDescriptorBytes];
  uint64_t words[kMaxParameters] = {};
  void* addresses[kMaxParameters];
  for (size_t i = 0; i < kMaxParameters; ++i) addresses[i] = &words[i];
  size_t used = 0;
  for (size_t i = 0; i < step.parameters.size(); ++i) {
    const Parameter& parameter = step.parameters[i];
    if (parameter.kind == Kind::constant) {
      words[i] = parameter.word;
      continue;
    }
    const auto* data = static_cast<const char*>(tensors[parameter.tensor].const_data_ptr());
    if (parameter.kind == Kind::address) {
      words[i] = reinterpret_cast<uint64_t>(data) + parameter.offset_bytes;
      continue;
    }
    unsigned char* descriptor = descriptors[used++];
    std::memcpy(descriptor, parameter.descriptor.data(), kDescriptorBytes);
    move_descriptor(descriptor, data);
    addresses[i] = descriptor;
  }
  launch_by_address(step.kernel, step.grid, stream, context, addresses);
}

void run(const Program& program, Tensors& tensors) {
  const Tensor like = tensors[0];
  for (int64_t floats : program.scratch) {
    tensors.push_back(at::empty({floats}, like.options().dtype(at::kFloat)));
  }
  void* stream = stream_for(like);
  for (const Step& step : program.steps) launch(step, program.context, tensors, stream);
}

// Whether the kernels read the tensor as it lies.
bool readable(const Tensor& t, const Tensor& q) {
  return t.dim() == 4 && t.stride(3) == 1 && t.scalar_type() == q.scalar_type() &&
      by_address(t, q);
}

std::tuple<Tensor, Tensor> run_forward(
    const Tensor& q, const Tensor& k, const Tensor& v, const Program& program) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  Tensor o = at::empty_like(q);
  Tensor lse = at::empty(q.sizes().slice(0, 3), q.options().dtype(at::kFloat));
  Tensors tensors{q, k, v, o, lse};
  run(program, tensors);
  return {o, lse};
}

std::tuple<Tensor, Tensor, Tensor> run_backward(
    const Tensor& grad, const variable_list& saved, const Program& program) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Tensor &q = saved[0], &k = saved[1], &v = saved[2], &o = saved[3], &lse = saved[4];
  Tensor dq = at::empty_like(q), dk = at::empty_like(k), dv = at::empty_like(v);
  Tensors tensors{grad, q, k, v, o, lse, at::empty_like(lse), dq, dk, dv};
  run(program, tensors);
  return {dq, dk, dv};
}

// What the launches by address cannot do. Python offers a program for the next call like it.
std::tuple<Tensor, Tensor, Tensor> backward_operator(
    const Tensor& grad, const variable_list& saved, bool is_causal, double scale) {
  using Signature = std::tuple<Tensor, Tensor, Tensor>(
      const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
      bool, double, bool);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("stepgauge::flash_attention_backward", "")
                             .typed<Signature>();
  return op.call(
      grad, saved[0], saved[1], saved[2], saved[3], saved[4], is_causal, scale, true);
}

struct Attention : torch::autograd::Function<Attention> {
  static variable_list forward(
      torch::autograd::AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
      bool is_causal, double scale, const Program* program) {
    auto [o, lse] = run_forward(q, k, v, *program);
    ctx->save_for_backward({q, k, v, o, lse});
    ctx->saved_data["is_causal"] = is_causal;
    ctx->saved_data["scale"] = scale;
    return {o};
  }

  static variable_list backward(torch::autograd::AutogradContext* ctx, variable_list gradients) {
    const bool wants_graph = at::GradMode::is_enabled() && gradients[0].requires_grad();
    variable_list results = once(ctx, gradients[0]);
    if (wants_graph) {  // As once_differentiable: an error when the second derivative is asked for.
      for (Tensor& result : results) result = result.detach().requires_grad_();
      auto refusal = std::make_shared<torch::autograd::DelayedError>(
          "trying to differentiate twice a function that was marked with @once_differentiable",
          static_cast<int64_t>(results.size()));
      results = (*refusal)(std::move(results));
    }
    results.resize(6);
    return results;
  }

  static variable_list once(torch::autograd::AutogradContext* ctx, Tensor grad) {
    const at::NoGradGuard no_grad;
    const auto saved = ctx->get_saved_variables();
    const Tensor& q = saved[0];
    const bool is_causal = ctx->saved_data["is_causal"].toBool();
    const double scale = ctx->saved_data["scale"].toDouble();
    const Program* program = nullptr;
    if (nobody_looks_on() && on_current_device(q)) {
      if (grad.dim() == 4 && grad.stride(3) != 1) grad = grad.contiguous();
      bool direct = readable(grad, q) && by_address(saved[4], q);
      for (size_t i = 0; i < 4; ++i) direct = direct && readable(saved[i], q);
      if (direct) program = find(key_of(q, saved[1], saved[2], is_causal, scale, &grad));
    }
    auto [dq, dk, dv] = program ? run_backward(grad, saved, *program)
                                : backward_operator(grad, saved, is_causal, scale);
    return {dq, dk, dv};
  }
};

// ---- what Python calls ------------------------------------------------------------------------

// Under autocast the types must be as it would make them.
bool autocast_is_content(const Tensor& q) {
  const auto device = q.device().type();
  return !at::autocast::is_autocast_enabled(device) ||
      at::autocast::get_autocast_dtype(device) == q.scalar_type();
}

// attention(q, k, v, is_causal, scale, deterministic): o, or None when Python must do it.
PyObject* serve(PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 6 || !THPVariable_CheckExact(args[0]) || !THPVariable_CheckExact(args[1]) ||
      !THPVariable_CheckExact(args[2]) || !PyBool_Check(args[3]) || args[5] != Py_True ||
      !(args[4] == Py_None || PyFloat_CheckExact(args[4])) || !nobody_looks_on()) {
    Py_RETURN_NONE;
  }
  const Tensor& q = THPVariable_Unpack(args[0]);
  const Tensor& k = THPVariable_Unpack(args[1]);
  const Tensor& v = THPVariable_Unpack(args[2]);
  if (!readable(q, q) || !readable(k, q) || !readable(v, q) || k.sizes() != v.sizes() ||
      !on_current_device(q) || !autocast_is_content(q)) {
    Py_RETURN_NONE;
  }
  const bool is_causal = args[3] == Py_True;
  const double scale = args[4] == Py_None ? std::pow(static_cast<double>(q.size(3)), -0.5)
                                          : PyFloat_AS_DOUBLE(args[4]);
  const Program* program = find(key_of(q, k, v, is_causal, scale, nullptr));
  if (!program) Py_RETURN_NONE;
  const bool needs_gradient = at::GradMode::is_enabled() &&
      (q.requires_grad() || k.requires_grad() || v.requires_grad());
  if (!needs_gradient) return THPVariable_Wrap(std::get<0>(run_forward(q, k, v, *program)));
  return THPVariable_Wrap(Attention::apply(q, k, v, is_causal, scale, program)[0]);
  END_HANDLE_TH_ERRORS
}

// configure(cuLaunchKernel, current_stream, cuCtxSetCurrent, cuTensorMapReplaceAddress)
PyObject* py_configure(PyObject*, PyObject* args) {
  unsigned long long launch, stream, context, replace;
  if (!PyArg_ParseTuple(args, "KKKK", &launch, &stream, &context, &replace)) return nullptr;
  launch_kernel = reinterpret_cast<LaunchKernel>(launch);
  current_stream = reinterpret_cast<CurrentStream>(stream);
  set_context = reinterpret_cast<SetContext>(context);
  replace_address = reinterpret_cast<ReplaceAddress>(replace);
  Py_RETURN_NONE;
}

// moved(descriptor, address): its bytes with that address in it.
PyObject* py_moved(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  const char* bytes;
  Py_ssize_t size;
  unsigned long long address;
  if (!PyArg_ParseTuple(args, "y#K", &bytes, &size, &address)) return nullptr;
  TORCH_CHECK_VALUE(size == kDescriptorBytes, "a descriptor has 128 bytes, not ", size);
  alignas(64) char descriptor[kDescriptorBytes];
  std::memcpy(descriptor, bytes, kDescriptorBytes);
  move_descriptor(descriptor, reinterpret_cast<void*>(address));
  return PyBytes_FromStringAndSize(descriptor, kDescriptorBytes);
  END_HANDLE_TH_ERRORS
}

bool parse_parameter(PyObject* given, Parameter& parameter, size_t num_tensors) {
  long kind;
  unsigned long long word, tensor;
  long long offset;
  const char* bytes;
  Py_ssize_t size;
  if (!PyArg_ParseTuple(given, "lKKLy#", &kind, &word, &tensor, &offset, &bytes, &size)) return false;
  parameter.kind = static_cast<Kind>(kind);
  parameter.word = word;
  parameter.tensor = tensor;
  parameter.offset_bytes = offset;
  const bool is_descriptor = parameter.kind == Kind::descriptor;
  TORCH_CHECK_VALUE(
      kind >= 0 && kind <= 2 && tensor < num_tensors &&
          size == static_cast<Py_ssize_t>(is_descriptor ? kDescriptorBytes : 0),
      "not a parameter: kind ", kind, ", tensor ", tensor, " of ", num_tensors, ", ", size, " bytes");
  std::memcpy(parameter.descriptor.data(), bytes, size);
  return true;
}

bool parse_step(PyObject* given, Step& step, size_t num_tensors) {
  unsigned long long function;
  PyObject* parameters;
  if (!PyArg_ParseTuple(
          given, "KIIIIIO!", &function, &step.kernel.threads, &step.kernel.shared_bytes,
          &step.grid[0], &step.grid[1], &step.grid[2], &PyTuple_Type, &parameters)) {
    return false;
  }
  step.kernel.function = reinterpret_cast<void*>(function);
  size_t descriptors = 0;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(parameters); ++i) {
    Parameter parameter;
    if (!parse_parameter(PyTuple_GET_ITEM(parameters, i), parameter, num_tensors)) return false;
    descriptors += parameter.kind == Kind::descriptor;
    step.parameters.push_back(parameter);
  }
  TORCH_CHECK_VALUE(
      step.parameters.size() + 4 <= kMaxParameters && descriptors <= kMaxDescriptors,
      "a kernel of ", step.parameters.size(), " parameters, ", descriptors, " of them descriptors");
  return true;
}

// register(q, k, v, grad or None, is_causal, scale, context, num_tensors, scratch, steps): tensors
// show the kind of call; without grad it is a forward. scratch: floats of each; step: (function,
// threads, shared, x, y, z, parameters); parameter: (kind, word, tensor, offset bytes, descriptor).
PyObject* py_register(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *q, *k, *v, *grad, *scratch, *steps;
  int is_causal;
  double scale;
  unsigned long long context, num_tensors;
  if (!PyArg_ParseTuple(
          args, "OOOOpdKKO!O!", &q, &k, &v, &grad, &is_causal, &scale, &context, &num_tensors,
          &PyTuple_Type, &scratch, &PyTuple_Type, &steps)) {
    return nullptr;
  }
  for (PyObject* tensor : {q, k, v, grad == Py_None ? q : grad}) {
    TORCH_CHECK_TYPE(THPVariable_Check(tensor), "register takes tensors first");
    TORCH_CHECK_VALUE(THPVariable_Unpack(tensor).dim() == 4, "tensors have four dimensions here");
  }
  Program program;
  program.context = reinterpret_cast<void*>(context);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(scratch); ++i) {
    program.scratch.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(scratch, i)));
    if (PyErr_Occurred()) return nullptr;
  }
  num_tensors += program.scratch.size();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(steps); ++i) {
    Step step;
    if (!parse_step(PyTuple_GET_ITEM(steps, i), step, num_tensors)) return nullptr;
    program.steps.push_back(std::move(step));
  }
  const Tensor* gradient = grad == Py_None ? nullptr : &THPVariable_Unpack(grad);
  const Key key = key_of(
      THPVariable_Unpack(q), THPVariable_Unpack(k), THPVariable_Unpack(v), is_causal, scale, gradient);
  const std::lock_guard<std::mutex> held(programs_lock);
  programs.emplace(key, std::move(program));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    serving<serve>("attention"),
    {"calls", py_calls, METH_NOARGS, nullptr},
    {"configure", py_configure, METH_VARARGS, nullptr},
    {"moved", py_moved, METH_VARARGS, nullptr},
    {"register", py_register, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

PyMODINIT_FUNC PyInit_stepgauge_attention() {
  return module_of("stepgauge_attention", methods);
}
