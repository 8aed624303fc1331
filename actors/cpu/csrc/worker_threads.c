/* Helpers: threads with the scheduler's idle policy, which run where nobody else wants to. A piece is claimed by whoever
   comes first, so a helper that does not run takes nothing and nobody waits for it. One that was pushed aside within a piece
   goes on where its caller is, which sleeps meanwhile, and by the common policy if the system lets it. Where others want that
   core, too, and it does not, this takes long: then nobody is called for many times as long, so that little is lost on a machine
   that has no idle core. */
#if defined(__linux__)
#define _GNU_SOURCE
#endif
#include "worker_threads.h"

#include <stdlib.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { PATIENCE_NS = 40000 }; /* a caller looks for so long before it sleeps */
enum { MUCH_NS = 1000000 };   /* of a caller's sleep in which its helpers did not run */
enum { REST = 16 };           /* times as long as that, if it was much, nobody is called */

typedef struct {
    _Alignas(64) _Atomic uint32_t is_inside; /* of a work: 1, or 2 if somebody sleeps until it leaves */
    pid_t thread;
    clockid_t clock; /* of the time that it ran */
    int is_here;     /* on its caller's core */
    float *room;
    int64_t n_room;
} Helper;

typedef struct {
    _Alignas(64) _Atomic uint32_t round; /* odd while there is work */
    _Atomic uint32_t has_ended;
    _Atomic int is_taken;
    _Atomic int n_helpers; /* that came; they have the places 1 to this */
    int core;              /* of the last caller: helpers are elsewhere */
    int64_t rests_until;   /* ns */
    int n_called; /* helpers that take part in this work: one that came meanwhile does not */
    int64_t n, least, most;
    Work work;
    void *of;
    _Alignas(64) _Atomic int64_t next;
    _Alignas(64) _Atomic int64_t n_all, n_helped; /* units so far, while there were helpers */
} Crew;

static Crew crew = {.core = -1};
static Helper helpers[CREW];

static const struct sched_param NOTHING = {0}; /* what both policies need */

static void sleep_while(_Atomic uint32_t *word, uint32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, 0, 0, 0);
}

static void wake(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, CREW, 0, 0, 0); }

static int64_t ns_of(clockid_t clock) {
    struct timespec time = {0};
    clock_gettime(clock, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
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
    if (atomic_load(&crew.round) == round && who <= crew.n_called) atomic_fetch_add(&crew.n_helped, compute(who));
    if (atomic_exchange(&helper->is_inside, 0) == 2) wake(&helper->is_inside);
}

/* After all have returned, and in a process that was forked off, which has none: others may come. */
void helpers_gone(void) {
    for (int who = 1; who < CREW; who++) {
        free(helpers[who].room);
        helpers[who] = (Helper){0};
    }
    atomic_store(&crew.n_helpers, 0);
    atomic_store(&crew.has_ended, 0);
    atomic_store(&crew.is_taken, 0);
    atomic_store(&crew.round, 0);
    crew.rests_until = 0;
}

/* A thread's life as a helper, which begins when that of the one before has, until `helpers_end`; `found` becomes 1 if there
   was a place for it and the system let it. */
void helper(int64_t *found) {
    static int is_told;
    int who = atomic_load(&crew.n_helpers) + 1;
    if (!is_told) is_told = !pthread_atfork(0, 0, helpers_gone);
    if (!(*found = who < CREW && !sched_setscheduler(0, SCHED_IDLE, &NOTHING))) return;
    helpers[who].thread = (pid_t)syscall(SYS_gettid);
    helpers[who].is_here = 1; /* wherever that is */
    pthread_getcpuclockid(pthread_self(), &helpers[who].clock);
    atomic_store(&crew.n_helpers, who);
    for (;;) {
        const uint32_t round = atomic_load(&crew.round); /* before has_ended: else its last change could be slept through */
        if (atomic_load(&crew.has_ended)) return;
        if (round % 2) help(&helpers[who], who, round);
        sleep_while(&crew.round, round);
    }
}

/* Nobody is called any more; threads that were helpers return. */
void helpers_end(void) {
    atomic_store(&crew.has_ended, 1);
    atomic_fetch_add(&crew.round, 2);
    wake(&crew.round);
}

/* How many helpers there are; units so far: all while there were some, and what helpers had of them (3). */
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
    for (int who = 1; who <= n_helpers; who++) {
        const pid_t thread = helpers[who].thread;
        if (sched_setscheduler(thread, SCHED_IDLE, &NOTHING) || sched_setaffinity(thread, sizeof others, &others)) return 0;
    }
    for (int who = 1; who <= n_helpers; who++) helpers[who].is_here = 0;
    crew.core = core;
    return 1;
}

/* Until it has left: it runs, or else gets this core, as one that may want it. How long it did neither, in ns. */
static int64_t wait_for(Helper *helper) {
    const int64_t until = ns_of(CLOCK_MONOTONIC) + PATIENCE_NS;
    while (atomic_load(&helper->is_inside)) {
        const int64_t since = ns_of(CLOCK_MONOTONIC);
        if (since <= until) continue;
        const int64_t had = ns_of(helper->clock);
        cpu_set_t here;
        CPU_ZERO(&here);
        CPU_SET(sched_getcpu(), &here); /* who calls may be elsewhere by now */
        helper->is_here = 1;
        sched_setaffinity(helper->thread, sizeof here, &here);
        sched_setscheduler(helper->thread, SCHED_OTHER, &NOTHING);
        uint32_t inside = 1;
        if (atomic_compare_exchange_strong(&helper->is_inside, &inside, 2)) inside = 2;
        while (inside) {
            sleep_while(&helper->is_inside, 2);
            inside = atomic_load(&helper->is_inside);
        }
        return ns_of(CLOCK_MONOTONIC) - since - (ns_of(helper->clock) - had);
    }
    return 0;
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

/* As `shared_out`, which has the helpers to itself. */
static void shared(int n_helpers, int64_t n, int64_t least, int64_t most, Work work, Gather gather, void *of) {
    crew.n_called = n_helpers, crew.n = n, crew.least = least, crew.most = most, crew.work = work, crew.of = of;
    atomic_store(&crew.next, 0);
    atomic_fetch_add(&crew.round, 1);
    wake(&crew.round);
    compute(0);
    atomic_fetch_add(&crew.round, 1);
    int64_t lost = 0;
    for (int who = 1; who <= n_helpers; who++) lost += wait_for(&helpers[who]);
    if (lost > MUCH_NS) crew.rests_until = ns_of(CLOCK_MONOTONIC) + REST * lost;
    for (int who = 1; gather && who <= n_helpers; who++) gather(of, who, helpers[who].room);
}

void shared_out(int64_t n, int64_t least, int64_t most, int64_t n_room, Work work, Gather gather, void *of) {
    const int n_helpers = atomic_load(&crew.n_helpers);
    int is_taken = 0;
    if (n_helpers) atomic_fetch_add(&crew.n_all, n);
    if (!n_helpers || n <= least || !atomic_compare_exchange_strong(&crew.is_taken, &is_taken, 1)) {
        work(of, 0, n, 0, 0);
        return;
    }
    const int may = ns_of(CLOCK_MONOTONIC) >= crew.rests_until;
    if (may && have_room(n_helpers, n_room) && send_away(n_helpers, sched_getcpu()))
        shared(n_helpers, n, least, most, work, gather, of);
    else
        work(of, 0, n, 0, 0);
    atomic_store(&crew.is_taken, 0);
}
#else
void helper(int64_t *found) { *found = 0; }
void helpers_end(void) {}
void helpers_gone(void) {}
void helped(int64_t *counts) { counts[0] = counts[1] = counts[2] = 0; }
void shared_out(int64_t n, int64_t least, int64_t most, int64_t n_room, Work work, Gather gather, void *of) {
    (void)least, (void)most, (void)n_room, (void)gather;
    work(of, 0, n, 0, 0);
}
#endif
