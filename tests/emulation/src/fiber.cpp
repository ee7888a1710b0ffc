// SPDX-License-Identifier: Apache-2.0
// The switch is written in assembly, as a function: to the compiler it is a call that clobbers what
// every call may clobber. It pushes the other registers, exchanges stacks, and pops.
#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#if defined(__x86_64__)

asm(R"(
.text
.globl emu_switch_stack
.hidden emu_switch_stack
.type emu_switch_stack, @function
emu_switch_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emu_switch_stack, . - emu_switch_stack
)");

namespace emu {
namespace {

constexpr size_t kSavedRegisters = 6;

}  // namespace

void* prepare_stack(char* top, void (*entry)()) {
    const uintptr_t aligned = reinterpret_cast<uintptr_t>(top) & ~uintptr_t{15};
    void** slot = reinterpret_cast<void**>(aligned);
    // The switch "returns" into entry. The empty slot above it stands for entry's own return
    // address, which also gives the alignment that the ABI promises at function entry.
    *--slot = nullptr;
    *--slot = reinterpret_cast<void*>(entry);
    for (size_t i = 0; i < kSavedRegisters; ++i) {
        *--slot = nullptr;
    }
    return slot;
}

}  // namespace emu

#elif defined(__aarch64__)

asm(R"(
.text
.globl emu_switch_stack
.hidden emu_switch_stack
.type emu_switch_stack, %function
emu_switch_stack:
    sub sp, sp, #160
    stp x19, x20, [sp]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size emu_switch_stack, . - emu_switch_stack
)");

namespace emu {
namespace {

constexpr size_t kSavedWords = 20;
constexpr size_t kLinkRegister = 11;  // x30, where the switch returns to

}  // namespace

void* prepare_stack(char* top, void (*entry)()) {
    const uintptr_t aligned = reinterpret_cast<uintptr_t>(top) & ~uintptr_t{15};
    uint64_t* words = reinterpret_cast<uint64_t*>(aligned) - kSavedWords;
    std::memset(words, 0, kSavedWords * sizeof(uint64_t));
    words[kLinkRegister] = reinterpret_cast<uint64_t>(entry);
    return words;
}

}  // namespace emu

#else
#error "the emulation needs a stack switch for this processor"
#endif

namespace emu {

StackPool stacks;

StackPool::~StackPool() {
    release();
}

void StackPool::release() {
    for (const Mapping& mapping : mappings_) {
        munmap(mapping.begin, mapping.bytes);
    }
    mappings_.clear();
    stacks_.clear();
}

bool StackPool::reserve(size_t count, size_t bytes) {
    if (bytes != stack_bytes_) {
        release();
        stack_bytes_ = bytes;
    }
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t pitch = (bytes + page - 1) / page * page + page;
    if (stacks_.size() >= count) {
        return true;
    }
    const size_t missing = count - stacks_.size();
    // Not reserved: most stacks are touched in their last page only.
    void* memory = mmap(nullptr, missing * pitch, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        return false;
    }
    char* begin = static_cast<char*>(memory);
    mappings_.push_back({begin, missing * pitch});
    for (size_t i = 0; i < missing; ++i) {
        char* guard = begin + i * pitch;
        if (mprotect(guard, page, PROT_NONE) != 0) {
            return false;  // each guard page costs a mapping, and their number is limited
        }
        stacks_.push_back(guard + pitch - bytes);
    }
    return true;
}

bool StackPool::contains(uintptr_t address) const {
    for (const Mapping& mapping : mappings_) {
        if (address - reinterpret_cast<uintptr_t>(mapping.begin) < mapping.bytes) {
            return true;
        }
    }
    return false;
}

}  // namespace emu
