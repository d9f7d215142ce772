// SPDX-License-Identifier: Apache-2.0
//
// The entry that compiled.py calls. KERNEL_FILE is the learner's file, and KERNEL_ the name of its function.
#include KERNEL_FILE

#include <cstring>
#include <exception>

namespace {

/// Calls f. Returns 0, or 1 with the text of its exception in `said`, which has 256 bytes.
template <class F>
int guarded(char* said, F&& f) {
    try {
        f();
        return 0;
    } catch (const std::exception& error) {
        std::strncpy(said, error.what(), 255);
        return 1;
    }
}

}  // namespace

#if defined(KERNEL_online_softmax)
extern "C" int entry(Matrix* m, const long* sizes, double, double* result, char* said) {
    return guarded(said, [&] {
        Tile o(1, m[1].width());
        result[o.width()] = online_softmax(m[0], m[1], o, static_cast<int>(sizes[0]));
        std::copy_n(o.data(), o.width(), result);
    });
}
#elif defined(KERNEL_forward)
extern "C" int entry(Matrix* m, const long* sizes, double scale, double*, char* said) {
    return guarded(said, [&] { forward(m[0], m[1], m[2], m[3], m[4], sizes[0], sizes[1], scale, sizes[2] != 0); });
}
#elif defined(KERNEL_backward)
extern "C" int entry(Matrix* m, const long* sizes, double scale, double*, char* said) {
    return guarded(said, [&] {
        backward(m[0], m[1], m[2], m[3], m[4], m[5], m[6], m[7], m[8], sizes[0], sizes[1], scale, sizes[2] != 0);
    });
}
#endif
