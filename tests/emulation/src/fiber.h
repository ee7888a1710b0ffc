// SPDX-License-Identifier: Apache-2.0
// Fibers: stacks, and the switch between them. One fiber runs one CUDA thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace emu {

// Saves the running context at *save and continues the one saved as `load`. Only what the calling
// convention preserves over a call is kept, which is why this is some 30 times faster than
// swapcontext (that one also makes two system calls).
extern "C" void emu_switch_stack(void** save, void* load);

// The initial context of a fiber that will run entry() on the stack that ends at `top`. entry()
// must never return: there is nothing below it.
void* prepare_stack(char* top, void (*entry)());

// Stacks of one size, reused from launch to launch. Each lies above a page that may not be touched,
// so that an overflow crashes instead of writing into a neighbour.
class StackPool {
public:
    ~StackPool();

    // Makes `count` stacks of `bytes` each available. False when the system refuses.
    bool reserve(size_t count, size_t bytes);
    char* stack(size_t index) const { return stacks_[index]; }
    size_t stack_bytes() const { return stack_bytes_; }
    // Whether the address lies in any stack.
    bool contains(uintptr_t address) const;

private:
    struct Mapping {
        char* begin;
        size_t bytes;
    };
    void release();

    std::vector<Mapping> mappings_;
    std::vector<char*> stacks_;
    size_t stack_bytes_ = 0;
};

extern StackPool stacks;

}  // namespace emu
