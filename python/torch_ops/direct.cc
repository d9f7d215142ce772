// SPDX-License-Identifier: Apache-2.0
//
// A function for Python that runs a plain call without gradients past PyTorch's binding and dispatcher, which take
// longer than all the rest of a small call. It takes Python's objects as they are and gives None where the operator has
// to do it: python/tessera/torch/_direct.py finds out how, and whether it may. No header of Python is needed, since
// what it calls is of Python's stable ABI and comes as addresses.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>
#include <exception>
#include <optional>

#include "results.hpp"

namespace tessera::torch_ops {
namespace {

using Object = void;  // a PyObject
using Function = Object*(Object* self, Object* const* arguments, std::int64_t count);

/// _direct.py has the same fields in the same order.
struct Python {
    std::int64_t type_at;      ///< bytes from an object to its class
    std::int64_t tensor_at;    ///< bytes from a torch.Tensor to its at::Tensor
    std::int64_t keys_at;      ///< bytes from a TensorImpl to its dispatch keys
    std::uint64_t keys[2];     ///< those of plain tensors of the device, outside and inside of inference mode
    const Object* classes[2];  ///< torch.Tensor, torch.nn.Parameter
    Object* none;
    Function* other;  ///< what to ask about other tensors, or null
    AOTITorchError (*to_object)(AtenTensorHandle, Object* type,
                                Object** result);  ///< torch_tensor_to_pyobject, or null:
    Object* (*wrap)(AtenTensorHandle);             ///< THPVariable_Wrap
    long long (*as_integer)(Object*);
    double (*as_float)(Object*);
    Object* (*error)();
    void (*clear_error)();
    void (*add_reference)(Object*);
    void* (*release_gil)();
    void (*take_gil)(void*);
};

Python python{};

Object* none() {
    python.add_reference(python.none);
    return python.none;
}

template <class Value>
Value word(const void* at, std::int64_t offset) {
    return *reinterpret_cast<const Value*>(static_cast<const char*>(at) + offset);
}

/// The tensor of an object; none where the dispatcher might do more with it than call a kernel of this device.
TensorRef tensor_of(Object* object) {
    const auto* its_class = word<const Object*>(object, python.type_at);
    if (its_class != python.classes[0] && its_class != python.classes[1]) return {};
    char* tensor = static_cast<char*>(object) + python.tensor_at;
    const auto* impl = word<const void*>(tensor, 0);
    const auto keys = word<std::uint64_t>(impl, python.keys_at);
    if (keys != python.keys[0] && keys != python.keys[1]) return {};
    return TensorRef(reinterpret_cast<AtenTensorHandle>(tensor));
}

/// The arguments after q, k, v: causal, heads_first, scale, window_left, window_right.
std::optional<Settings> settings_of(Object* const* arguments) {
    Settings settings;
    settings.causal = python.as_integer(arguments[0]);
    const long long heads_first = python.as_integer(arguments[1]);
    if (arguments[2] != python.none) settings.scale = python.as_float(arguments[2]);
    settings.window_left = python.as_integer(arguments[3]);
    settings.window_right = python.as_integer(arguments[4]);
    settings.heads_first = heads_first != 0;
    if (python.error() == nullptr) return settings;
    python.clear_error();
    return std::nullopt;
}

std::optional<Tensor> o_of(const Inputs& in, const Settings& settings) {
    std::optional<Tensor> o;
    void* thread = python.release_gil();  // whoever waits for the device here must not stop other threads
    try {
        o = run_forward(in, settings, {.lse = false}).o;
    } catch (const std::exception&) {  // the operator will find the same, and can say it
    }
    python.take_gil(thread);
    return o;
}

/// q, k, v, causal, heads_first, scale, window_left, window_right -> O, or None.
Object* attention(Object* self, Object* const* arguments, std::int64_t count) {
    if (count != 8) return none();
    const Inputs in{tensor_of(arguments[0]), tensor_of(arguments[1]), tensor_of(arguments[2])};
    if (!in.q.has_value() || !in.k.has_value() || !in.v.has_value()) {
        return python.other != nullptr ? python.other(self, arguments, count) : none();
    }
    const std::optional<Settings> settings = settings_of(arguments + 3);
    if (!settings.has_value()) return none();
    const std::optional<Tensor> o = o_of(in, *settings);
    if (!o.has_value()) return none();
    if (python.to_object == nullptr) return python.wrap(o->get());
    Object* result = nullptr;
    return python.to_object(o->get(), nullptr, &result) == AOTI_TORCH_SUCCESS ? result : none();
}

}  // namespace
}  // namespace tessera::torch_ops

/// The function as a METH_FASTCALL of Python's, from then on by this table.
extern "C" __attribute__((visibility("default"))) void* tessera_torch_direct(const tessera::torch_ops::Python* table) {
    tessera::torch_ops::python = *table;
    return reinterpret_cast<void*>(&tessera::torch_ops::attention);
}
