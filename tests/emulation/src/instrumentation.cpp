// SPDX-License-Identifier: Apache-2.0
// The functions that the compiler calls in instrumented code. -fsanitize=thread calls __tsan_* at
// every access to memory; libtsan, which usually has them, is not linked. -fsanitize=alignment
// calls __ubsan_* for every pointer that is not aligned for its type.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "access.h"

namespace emu {

bool instrumented = false;

namespace {

// These mirror what the compiler emits.
struct SourceLocation {
    const char* file;
    uint32_t line;
    uint32_t column;
};
struct TypeMismatch {
    SourceLocation location;
    const void* type;
    unsigned char log2_alignment;
    unsigned char kind;
};

bool is_emulation_header(const char* file) {
    return std::strstr(file, "emulation/include/") != nullptr;
}

}  // namespace
}  // namespace emu

#define EMU_RETURN_ADDRESS reinterpret_cast<uintptr_t>(__builtin_return_address(0))
#define EMU_CHECK(address, bytes, kind) \
    emu::check_access(                  \
        {reinterpret_cast<uintptr_t>(address), bytes, emu::AccessKind::kind, EMU_RETURN_ADDRESS})

extern "C" {

// Runs when a library with instrumented code is loaded.
void __tsan_init() {
    emu::instrumented = true;
}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

// "unaligned" is code for types that need no alignment, such as packed structs.
#define EMU_HOOKS(bytes)                                \
    void __tsan_read##bytes(void* address) {            \
        EMU_CHECK(address, bytes, kRead);               \
    }                                                   \
    void __tsan_write##bytes(void* address) {           \
        EMU_CHECK(address, bytes, kWrite);              \
    }                                                   \
    void __tsan_unaligned_read##bytes(void* address) {  \
        EMU_CHECK(address, bytes, kRead);               \
    }                                                   \
    void __tsan_unaligned_write##bytes(void* address) { \
        EMU_CHECK(address, bytes, kWrite);              \
    }
EMU_HOOKS(1)
EMU_HOOKS(2)
EMU_HOOKS(4)
EMU_HOOKS(8)
EMU_HOOKS(16)
#undef EMU_HOOKS

void __tsan_read_range(void* address, size_t bytes) {
    EMU_CHECK(address, bytes, kRead);
}
void __tsan_write_range(void* address, size_t bytes) {
    EMU_CHECK(address, bytes, kWrite);
}

// clang calls these where g++ leaves memcpy and memset as they are.
void* __tsan_memcpy(void* target, const void* source, size_t bytes) {
    EMU_CHECK(source, bytes, kRead);
    EMU_CHECK(target, bytes, kWrite);
    return std::memcpy(target, source, bytes);
}
void* __tsan_memmove(void* target, const void* source, size_t bytes) {
    EMU_CHECK(source, bytes, kRead);
    EMU_CHECK(target, bytes, kWrite);
    return std::memmove(target, source, bytes);
}
void* __tsan_memset(void* target, int value, size_t bytes) {
    EMU_CHECK(target, bytes, kWrite);
    return std::memset(target, value, bytes);
}

void __ubsan_handle_type_mismatch_v1(emu::TypeMismatch* mismatch, void* pointer) {
    if (emu::current == nullptr) {
        return;  // host code
    }
    const bool in_header = emu::is_emulation_header(mismatch->location.file);
    const emu::Site site{mismatch->location.file, static_cast<int>(mismatch->location.line)};
    // A __ldg is inlined into the kernel: then only its code address leads to the kernel's line.
    emu::report_misaligned(reinterpret_cast<uintptr_t>(pointer),
                           size_t{1} << mismatch->log2_alignment,
                           in_header ? emu::Place::of(EMU_RETURN_ADDRESS) : emu::Place::of(site));
}

}  // extern "C"
