/* Preloaded: wall clocks that a test moves while processes run. Monotonic clocks stay as they are.
   A table of one entry for each process id, mapped from the file CLOCK_TABLE; entry 0 is of all processes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define ENTRIES (1 << 22)
#define SECOND 1000000000LL

/* After since_ns a clock takes slow_by seconds for one; 0: it goes right. */
struct moved { int64_t by_ns, since_ns, slow_by; };

static volatile struct moved *table;
static int (*real_clock_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void) {
    real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    const char *path = getenv("CLOCK_TABLE");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *mapped = mmap(NULL, ENTRIES * sizeof(struct moved), PROT_READ, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED) table = mapped;
    close(file);
}

static int64_t apply(int64_t now_ns, volatile struct moved *one) {
    int64_t since_ns = one->since_ns, slow_by = one->slow_by;
    if (slow_by && now_ns > since_ns) now_ns = since_ns + (now_ns - since_ns) / slow_by;
    return now_ns + one->by_ns;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    if (!real_clock_gettime) real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real_clock_gettime(clock, now);
    if (failed || !table || (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE)) return failed;
    int64_t now_ns = now->tv_sec * SECOND + now->tv_nsec;
    now_ns = apply(apply(now_ns, &table[getpid()]), &table[0]);
    now->tv_sec = now_ns / SECOND;
    now->tv_nsec = now_ns % SECOND;
    return 0;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *to) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (to) *to = found.tv_sec;
    return found.tv_sec;
}
