// SPDX-License-Identifier: Apache-2.0
// In instrumented code the compiler calls these for std::atomic and what is built on it: reference
// counts, and the guards of static variables. Kernels have none of that, since nvcc would refuse
// it; the host code of a unit may, and there they need no check.
#include <cstdint>

#define EMU_HOST_ATOMICS(bits)                                                                    \
    int##bits##_t __tsan_atomic##bits##_load(const volatile int##bits##_t* address, int) {        \
        return __atomic_load_n(address, __ATOMIC_SEQ_CST);                                        \
    }                                                                                             \
    void __tsan_atomic##bits##_store(volatile int##bits##_t* address, int##bits##_t value, int) { \
        __atomic_store_n(address, value, __ATOMIC_SEQ_CST);                                       \
    }                                                                                             \
    int##bits##_t __tsan_atomic##bits##_exchange(volatile int##bits##_t* address,                 \
                                                 int##bits##_t value, int) {                      \
        return __atomic_exchange_n(address, value, __ATOMIC_SEQ_CST);                             \
    }                                                                                             \
    int##bits##_t __tsan_atomic##bits##_fetch_add(volatile int##bits##_t* address,                \
                                                  int##bits##_t value, int) {                     \
        return __atomic_fetch_add(address, value, __ATOMIC_SEQ_CST);                              \
    }                                                                                             \
    int##bits##_t __tsan_atomic##bits##_fetch_sub(volatile int##bits##_t* address,                \
                                                  int##bits##_t value, int) {                     \
        return __atomic_fetch_sub(address, value, __ATOMIC_SEQ_CST);                              \
    }                                                                                             \
    int __tsan_atomic##bits##_compare_exchange_strong(volatile int##bits##_t* address,            \
                                                      int##bits##_t* expected,                    \
                                                      int##bits##_t desired, int, int) {          \
        return __atomic_compare_exchange_n(address, expected, desired, false, __ATOMIC_SEQ_CST,   \
                                           __ATOMIC_SEQ_CST);                                     \
    }

extern "C" {

EMU_HOST_ATOMICS(8)
EMU_HOST_ATOMICS(32)
EMU_HOST_ATOMICS(64)

}  // extern "C"

#undef EMU_HOST_ATOMICS
