/* Arena memory: exact size, huge pages, absent from forked children. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "zaio.h"

enum { HUGE_PAGE = 2 << 20 };

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

/* The reservation is one huge page longer than asked, and trimmed on both sides to an aligned base and the exact size:
   what is given back was never touched, so the arena costs what it is asked for. */
int zaio_arena_map(int64_t num_bytes, int huge_pages, char **base, int *granted) {
    size_t size = (size_t)num_bytes, reserved = size + HUGE_PAGE;
    char *start = mmap(NULL, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return -errno;
    size_t before = (HUGE_PAGE - (uintptr_t)start % HUGE_PAGE) % HUGE_PAGE;
    if (before) munmap(start, before);
    if (reserved - before - size) munmap(start + before + size, reserved - before - size);
    *base = start + before;
    *granted = 0;
    if (huge_pages && madvise(*base, size, MADV_HUGEPAGE) == 0) *granted |= ZAIO_ARENA_HUGE;
    /* A fork would share the pages copy-on-write, and a transfer under way would land in the wrong copy. */
    if (madvise(*base, size, MADV_DONTFORK) == 0) *granted |= ZAIO_ARENA_DONTFORK;
    return 0;
}

int zaio_arena_lock(char *base, int64_t num_bytes) {
#if defined(SYS_mlock2) && defined(MLOCK_ONFAULT)
    if (syscall(SYS_mlock2, base, (size_t)num_bytes, MLOCK_ONFAULT) == 0) return 0;
    if (errno != ENOSYS && errno != EINVAL) return -errno;
#endif
    return mlock(base, (size_t)num_bytes) < 0 ? -errno : 0;
}

int zaio_arena_touch(char *base, int64_t num_bytes) {
    if (madvise(base, (size_t)num_bytes, MADV_POPULATE_WRITE) == 0) return 0;
    if (errno != EINVAL) return -errno;
    for (int64_t at = 0; at < num_bytes; at += 4096) ((volatile char *)base)[at] = ((volatile char *)base)[at];
    return 0;
}

int zaio_arena_unmap(char *base, int64_t num_bytes) { return munmap(base, (size_t)num_bytes) < 0 ? -errno : 0; }
