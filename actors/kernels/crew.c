/* Helpers: threads with the scheduler's idle policy, which run where nobody else wants to. A piece is claimed by whoever
   comes first, so a helper that does not run takes nothing and nobody waits for it. One that was pushed aside within a piece
   goes on where its caller was, which sleeps meanwhile. */
#if defined(__linux__)
#define _GNU_SOURCE
#endif
#include "crew.h"

#include <stdlib.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { PATIENCE_NS = 40000 }; /* a caller looks for so long before it sleeps */

typedef struct {
    _Alignas(64) _Atomic uint32_t is_inside; /* of a work: 1, or 2 if somebody sleeps until it leaves */
    pid_t thread;
    int is_here; /* on its caller's core */
    float *room;
    int64_t n_room;
} Helper;

typedef struct {
    _Alignas(64) _Atomic uint32_t round; /* odd while there is work */
    _Atomic uint32_t has_ended;
    _Atomic int is_taken;
    _Atomic int n_helpers; /* that came; they have the places 1 to this */
    int core;              /* of the last caller: helpers are elsewhere */
    int64_t n, least, most;
    Work work;
    void *of;
    _Alignas(64) _Atomic int64_t next;
    _Alignas(64) _Atomic int64_t n_all, n_helped; /* units so far */
} Crew;

static Crew crew = {.core = -1};
static Helper helpers[CREW];

static void sleep_while(_Atomic uint32_t *word, uint32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, 0, 0, 0);
}

static void wake(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, CREW, 0, 0, 0); }

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Pieces become smaller towards the end, so that all end at about one time. */
static int64_t claim(int64_t n_workers, int64_t *end) {
    int64_t first = atomic_load(&crew.next), size;
    do {
        const int64_t left = crew.n - first;
        if (left <= 0) return -1;
        size = left / (2 * n_workers) / crew.least * crew.least;
        size = size < crew.least ? crew.least : size > crew.most ? crew.most : size;
        size = size < left ? size : left;
    } while (!atomic_compare_exchange_weak(&crew.next, &first, first + size));
    *end = first + size;
    return first;
}

static int64_t compute(int who) {
    const int64_t n_workers = atomic_load(&crew.n_helpers) + 1;
    int64_t first, end, n = 0;
    while ((first = claim(n_workers, &end)) >= 0) {
        crew.work(crew.of, first, end, who, helpers[who].room);
        n += end - first;
    }
    return n;
}

/* One look at the work of this round. */
static void help(Helper *helper, int who, uint32_t round) {
    atomic_store(&helper->is_inside, 1);
    if (atomic_load(&crew.round) == round) atomic_fetch_add(&crew.n_helped, compute(who));
    if (atomic_exchange(&helper->is_inside, 0) == 2) wake(&helper->is_inside);
}

/* A thread's life as a helper, which begins when that of the one before has, until `helpers_end`; `found` becomes 1 if there was a place for it and the system let it. */
void helper(int64_t *found) {
    int who = atomic_load(&crew.n_helpers) + 1;
    const struct sched_param none = {0};
    if (!(*found = who < CREW && !sched_setscheduler(0, SCHED_IDLE, &none))) return;
    helpers[who].thread = (pid_t)syscall(SYS_gettid);
    helpers[who].is_here = 1; /* wherever that is */
    atomic_store(&crew.n_helpers, who);
    for (uint32_t round; !atomic_load(&crew.has_ended); sleep_while(&crew.round, round))
        if ((round = atomic_load(&crew.round)) % 2) help(&helpers[who], who, round);
}

/* Nobody is called any more; threads that were helpers return. */
void helpers_end(void) {
    atomic_store(&crew.has_ended, 1);
    atomic_fetch_add(&crew.round, 2);
    wake(&crew.round);
}

/* After all have returned: others may come. */
void helpers_gone(void) {
    for (int who = 1; who < CREW; who++) {
        free(helpers[who].room);
        helpers[who] = (Helper){0};
    }
    atomic_store(&crew.n_helpers, 0);
    atomic_store(&crew.has_ended, 0);
}

/* How many helpers there are; units so far: all that were shared out, and what helpers had of them (3). */
void helped(int64_t *counts) {
    counts[0] = atomic_load(&crew.n_helpers), counts[1] = atomic_load(&crew.n_all);
    counts[2] = atomic_load(&crew.n_helped);
}

/* All helpers to any core but this one, which their caller computes on; 0 where there is no other. */
static int send_away(int n_helpers, int core) {
    int is_done = crew.core == core;
    for (int who = 1; who <= n_helpers; who++) is_done = is_done && !helpers[who].is_here;
    if (is_done) return 1;
    cpu_set_t others;
    if (core < 0 || core >= CPU_SETSIZE || sched_getaffinity(0, sizeof others, &others)) return 0;
    CPU_CLR(core, &others);
    if (!CPU_COUNT(&others)) return 0;
    for (int who = 1; who <= n_helpers; who++)
        if (sched_setaffinity(helpers[who].thread, sizeof others, &others)) return 0;
    for (int who = 1; who <= n_helpers; who++) helpers[who].is_here = 0;
    crew.core = core;
    return 1;
}

/* Until it has left: it runs, or else gets this core. */
static void wait_for(Helper *helper, int core) {
    const int64_t until = now_ns() + PATIENCE_NS;
    while (atomic_load(&helper->is_inside))
        if (now_ns() > until) {
            cpu_set_t here;
            CPU_ZERO(&here);
            CPU_SET(core, &here);
            helper->is_here = 1;
            sched_setaffinity(helper->thread, sizeof here, &here);
            uint32_t inside = 1;
            if (atomic_compare_exchange_strong(&helper->is_inside, &inside, 2)) inside = 2;
            while (inside) {
                sleep_while(&helper->is_inside, 2);
                inside = atomic_load(&helper->is_inside);
            }
        }
}

/* Room for each; 0 where there is no memory. */
static int have_room(int n_helpers, int64_t n) {
    for (int who = 1; who <= n_helpers; who++) {
        Helper *helper = &helpers[who];
        if (helper->n_room >= n) continue;
        free(helper->room);
        helper->room = aligned_alloc(64, (size_t)(n + 15) / 16 * 64);
        helper->n_room = helper->room ? n : 0;
        if (!helper->room) return 0;
    }
    return 1;
}

const float *room_of(int who) { return helpers[who].room; }

void shared_out(int64_t n, int64_t least, int64_t most, int64_t n_room, Work work, void *of) {
    const int n_helpers = atomic_load(&crew.n_helpers), core = n_helpers ? sched_getcpu() : -1;
    int is_taken = 0;
    if (!n_helpers || n <= least || !atomic_compare_exchange_strong(&crew.is_taken, &is_taken, 1)) {
        work(of, 0, n, 0, 0);
        return;
    }
    if (have_room(n_helpers, n_room) && send_away(n_helpers, core)) {
        crew.n = n, crew.least = least, crew.most = most, crew.work = work, crew.of = of;
        atomic_store(&crew.next, 0);
        atomic_fetch_add(&crew.round, 1);
        wake(&crew.round);
        compute(0);
        atomic_fetch_add(&crew.round, 1);
        for (int who = 1; who <= n_helpers; who++) wait_for(&helpers[who], core);
        atomic_fetch_add(&crew.n_all, n);
    } else
        work(of, 0, n, 0, 0);
    atomic_store(&crew.is_taken, 0);
}
#else
void helper(int64_t *found) { *found = 0; }
void helpers_end(void) {}
void helpers_gone(void) {}
void helped(int64_t *counts) { counts[0] = counts[1] = counts[2] = 0; }
void shared_out(int64_t n, int64_t least, int64_t most, int64_t n_room, Work work, void *of) {
    (void)least, (void)most, (void)n_room;
    work(of, 0, n, 0, 0);
}
const float *room_of(int who) {
    (void)who;
    return 0;
}
#endif
