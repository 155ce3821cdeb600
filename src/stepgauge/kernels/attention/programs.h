// What Python has planned and compiled, kept by the kind of call, and how it is launched.
//
// A program is what Python launched for a kind of call: per kernel the handle, the grid and every
// argument, which is a constant, the address of a tensor, or a copy descriptor of a tensor, whose
// bytes Triton made and in which only the address changes (extension.py).

#pragma once

#include "launch.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>

#include <array>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

using Tensors = std::vector<Tensor>;

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

// All that a call's launches depend on. Of a backward: with the gradient and the output.
struct Call {
  const Tensor &q, &k, &v;
  bool is_causal;
  double scale;
  const Tensor* grad = nullptr;
  const Tensor* o = nullptr;
};

// device, type, mask, pass and products, scale, then sizes and strides as they are needed.
using Key = std::array<int64_t, 32>;

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

Key key_of(const Call& call, bool in_tf32) {
  const Tensor &q = call.q, &k = call.k;
  Key key{};
  size_t at = 0;
  key[at++] = q.is_cpu() ? -1 : q.device().index();
  key[at++] = static_cast<int64_t>(q.scalar_type());
  key[at++] = call.is_causal + 2 * (call.grad != nullptr) + 4 * in_tf32;
  std::memcpy(&key[at++], &call.scale, sizeof call.scale);
  auto add = [&](at::IntArrayRef values) {
    for (int64_t value : values) key[at++] = value;
  };
  for (at::IntArrayRef values :
       {q.sizes(), q.strides(), k.sizes(), k.strides(), call.v.strides()}) {
    add(values);
  }
  for (const Tensor* each : {call.grad, call.o}) {
    if (each) add(each->strides());
  }
  return key;
}

// Whether products of such numbers are in tf32 now: what matmul_precision (launching.py) reads.
bool multiplied_in_tf32(const Tensor& like) {
  if (like.scalar_type() != at::kFloat) return false;
  const auto& context = at::globalContext();
  const auto setting =
      context.float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL);
  return setting == at::Float32Precision::NONE ? context.allowTF32CuBLAS()
                                               : setting == at::Float32Precision::TF32;
}

// Programs are never removed or changed. The autograd engine's threads look for theirs without
// Python's lock.
std::unordered_map<Key, Program, Hash> programs;
std::mutex programs_lock;

const Program* find(const Call& call) {
  const Key key = key_of(call, multiplied_in_tf32(call.q));
  const std::lock_guard<std::mutex> held(programs_lock);
  const auto found = programs.find(key);
  return found == programs.end() ? nullptr : &found->second;
}

void keep(const Call& call, bool in_tf32, Program program) {
  const std::lock_guard<std::mutex> held(programs_lock);
  programs.emplace(key_of(call, in_tf32), std::move(program));
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

}  // namespace
