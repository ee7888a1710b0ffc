// SPDX-License-Identifier: Apache-2.0
// Launching a kernel function, and the variables it shares between the threads of a block.
#pragma once

#include <tuple>
#include <utility>

#include "emulation/runtime.h"

namespace emu {

template <class... Parameters>
struct KernelCall {
    void (*kernel)(Parameters...);
    std::tuple<std::decay_t<Parameters>...> arguments;

    // Every thread works on its own copy of the arguments, as every CUDA thread does.
    static void invoke(const void* call) {
        const KernelCall* self = static_cast<const KernelCall*>(call);
        std::tuple<std::decay_t<Parameters>...> own = self->arguments;
        std::apply(self->kernel, own);
    }
};

template <class... Parameters, class... Arguments>
const char* launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                   bool cooperative, Arguments&&... arguments) {
    using Call = KernelCall<Parameters...>;
    const Call call{kernel, {std::forward<Arguments>(arguments)...}};
    return run({grid, block, shared_bytes, cooperative, &Call::invoke, &call, sizeof(call)});
}

// The tag (a lambda type) tells apart variables of one type, and the instances of one template.
template <class T, class Tag>
struct SharedVariableOf {
    static inline SharedVariable variable;
};

template <class T, class Tag>
T& shared_variable_of(Tag, const char* name, Site site = Site::here()) {
    return *static_cast<T*>(
        shared_variable(&SharedVariableOf<T, Tag>::variable, name, sizeof(T), alignof(T), site));
}

}  // namespace emu

#define EMU_SHARED(T, name, ...)       \
    typedef T name##_type __VA_ARGS__; \
    auto& name = ::emu::shared_variable_of<name##_type>([] {}, #name)

#define EMU_DYNAMIC_SHARED(T, name) \
    T* name = static_cast<T*>(::emu::dynamic_shared(::emu::Site::here()))
