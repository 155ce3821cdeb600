// What Python tells C++: the driver's functions, and a program for a kind of call.

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "programs.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

namespace {

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

// A program for calls like that of `tensors`, (q, k, v) or for a backward (q, k, v, grad, o).
// scratch: floats of each temporary; step: (function, threads, shared, x, y, z, parameters);
// parameter: (kind, word, tensor, offset bytes, descriptor).
// register(tensors, is_causal, scale, in_tf32, context, num_tensors, scratch, steps)
PyObject* py_register(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *given, *scratch, *steps;
  int is_causal, in_tf32;
  double scale;
  unsigned long long context, num_tensors;
  if (!PyArg_ParseTuple(
          args, "O!pdpKKO!O!", &PyTuple_Type, &given, &is_causal, &scale, &in_tf32, &context,
          &num_tensors, &PyTuple_Type, &scratch, &PyTuple_Type, &steps)) {
    return nullptr;
  }
  Tensors tensors;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given); ++i) {
    PyObject* tensor = PyTuple_GET_ITEM(given, i);
    TORCH_CHECK_TYPE(THPVariable_Check(tensor), "register takes tensors first");
    tensors.push_back(THPVariable_Unpack(tensor));
    TORCH_CHECK_VALUE(tensors.back().dim() == 4, "tensors have four dimensions here");
  }
  TORCH_CHECK_VALUE(
      tensors.size() == 3 || tensors.size() == 5, "3 or 5 tensors, not ", tensors.size());
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
  Call call{tensors[0], tensors[1], tensors[2], is_causal != 0, scale};
  if (tensors.size() == 5) {
    call.grad = &tensors[3];
    call.o = &tensors[4];
  }
  keep(call, in_tf32, std::move(program));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

}  // namespace
