// What every extension's Python module has: functions that serve or return None, and how often they did.

#pragma once

#include <Python.h>

namespace {

long long calls_asked = 0, calls_taken = 0;  // under the interpreter's lock

using Serve = PyObject* (*)(PyObject* const*, Py_ssize_t);

template <Serve serve>
PyObject* counted(PyObject*, PyObject* const* args, Py_ssize_t count) {
  ++calls_asked;
  PyObject* result = serve(args, count);
  calls_taken += result != Py_None;  // an error too is not left to Python
  return result;
}

// calls(): how often it was asked, and how often it did not leave the work to Python.
PyObject* py_calls(PyObject*, PyObject*) {
  return Py_BuildValue("(LL)", calls_asked, calls_taken);
}

template <Serve serve>
PyMethodDef serving(const char* name) {
  return {
      name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&counted<serve>)), METH_FASTCALL,
      nullptr};
}

// `methods` end with an empty one.
PyObject* module_of(const char* name, PyMethodDef* methods) {
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, name, nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&definition);
}

}  // namespace
