// SPDX-License-Identifier: Apache-2.0
//
// Two symbols that GCC 12's libstdc++ expects of glibc 2.30 and 2.32, for libraries that run with glibc 2.28.
// scripts/manylinux_sysroot.sh compiles this file into the libraries of a wheel, hidden.
#include <pthread.h>
#include <time.h>

// 0: assume that there are threads, which costs std::shared_ptr an atomic operation and is always right.
char __libc_single_threaded = 0;

// Waits on the realtime clock for as long as the deadline is away on the given one.
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const struct timespec* deadline) {
    struct timespec there, here;
    clock_gettime(clock, &there);
    clock_gettime(CLOCK_REALTIME, &here);
    const long second = 1000000000;
    here.tv_sec += deadline->tv_sec - there.tv_sec;
    here.tv_nsec += deadline->tv_nsec - there.tv_nsec;
    if (here.tv_nsec < 0) {
        here.tv_nsec += second;
        --here.tv_sec;
    } else if (here.tv_nsec >= second) {
        here.tv_nsec -= second;
        ++here.tv_sec;
    }
    return pthread_cond_timedwait(condition, mutex, &here);
}
