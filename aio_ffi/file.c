/* Files: their two descriptors, space and durability. */
#define _GNU_SOURCE
#include "zaio_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

int zaio_file_create(zaio_engine *engine, int fd, int fd_buffered, int direct, int64_t align, int64_t mem_align,
                     int lane, zaio_file **out) {
    if (lane == LANE_RINGS && !engine->lanes[LANE_RINGS].num_workers) return -EINVAL;
    int rc = lane == LANE_THREADS ? threads_start(engine) : 0;
    if (rc < 0) return rc;
    zaio_file *file = calloc(1, sizeof *file);
    if (!file) return -ENOMEM;
    *file = (zaio_file){.engine = engine, .fd = fd, .fd_buffered = fd_buffered, .lane = lane, .direct = direct,
                        .align = align, .mem_align = mem_align};
    /* Partial blocks are rare: reading ahead of them would only fill the page cache. */
    if (direct) posix_fadvise(fd_buffered, 0, 0, POSIX_FADV_RANDOM);
    *out = file;
    return 0;
}

int zaio_file_sync(zaio_file *file) {
    if (file->engine->faults) fault_gate(file->engine, ZAIO_GATE_SYNC);
    int rc = fdatasync(file->fd_buffered) < 0 ? -errno : 0; /* EINTR included: what was lost cannot be known */
    if (file->engine->faults) rc = (int)fault_result(file->engine, ZAIO_FAULT_SYNC, rc);
    return rc;
}

int zaio_file_free(zaio_file *file) {
    zaio_engine *engine = file->engine;
    pthread_mutex_lock(&engine->mutex);
    bool busy = file->in_flight > 0;
    pthread_mutex_unlock(&engine->mutex);
    if (busy) return -EBUSY;
    int rc = close(file->fd) < 0 ? -errno : 0;
    if (file->fd_buffered != file->fd && close(file->fd_buffered) < 0 && !rc) rc = -errno;
    free(file);
    return rc;
}

int zaio_reserve(int fd, int64_t num_bytes) {
    int rc;
    do rc = fallocate(fd, 0, 0, num_bytes) < 0 ? -errno : 0;
    while (rc == -EINTR);
    return rc;
}

int zaio_dio_align(int fd, int64_t *mem_align, int64_t *offset_align) {
#ifdef STATX_DIOALIGN
    struct statx s;
    if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &s) < 0) return -errno;
    if (!(s.stx_mask & STATX_DIOALIGN) || !s.stx_dio_offset_align) return -ENOTSUP;
    *mem_align = s.stx_dio_mem_align;
    *offset_align = s.stx_dio_offset_align;
    return 0;
#else
    (void)fd;
    (void)mem_align;
    (void)offset_align;
    return -ENOTSUP;
#endif
}
