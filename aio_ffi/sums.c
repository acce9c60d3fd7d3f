/* Threads that make checksums of what the rings have moved. A ring that did it itself would leave the device without
   requests meanwhile: with the processors busy elsewhere, that is a tenth of the drive's rate. */
#define _GNU_SOURCE
#include "zaio_internal.h"

static void *summer_main(void *arg) {
    zaio_engine *engine = arg;
    sums *sums = &engine->sums;
    pthread_mutex_lock(&engine->mutex);
    for (;;) {
        zaio_op *op = sums->head;
        if (op) {
            sums->head = op->next;
            pthread_mutex_unlock(&engine->mutex);
            finish_checksum(op);
            pthread_mutex_lock(&engine->mutex);
        } else if (sums->stopping) {
            pthread_mutex_unlock(&engine->mutex);
            return NULL;
        } else {
            pthread_cond_wait(&sums->work, &engine->mutex);
        }
    }
}

void sums_start(zaio_engine *engine) {
    sums *sums = &engine->sums;
    pthread_cond_init(&sums->work, NULL);
    while (sums->num_threads < engine->options.num_rings &&
           !start_thread(&sums->threads[sums->num_threads], summer_main, engine, "zinf-sum"))
        sums->num_threads++;
}

void sums_take(zaio_engine *engine, zaio_op *op) {
    sums *sums = &engine->sums;
    if (!sums->num_threads) { /* none could be started */
        finish_checksum(op);
        return;
    }
    op->next = NULL;
    pthread_mutex_lock(&engine->mutex);
    if (sums->head) sums->tail->next = op;
    else sums->head = op;
    sums->tail = op;
    pthread_cond_signal(&sums->work);
    pthread_mutex_unlock(&engine->mutex);
}

void sums_stop(zaio_engine *engine) {
    sums *sums = &engine->sums;
    pthread_mutex_lock(&engine->mutex);
    sums->stopping = true;
    pthread_cond_broadcast(&sums->work);
    pthread_mutex_unlock(&engine->mutex);
    for (int i = 0; i < sums->num_threads; i++) pthread_join(sums->threads[i], NULL);
    sums->num_threads = 0;
}
