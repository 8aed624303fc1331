/* Work that other threads of the process, helpers, take a part of while their cores have nothing else to do. */
#ifndef AREAL_BUS_CREW_H
#define AREAL_BUS_CREW_H

#include <stdint.h>

enum { CREW = 16 }; /* who computes: 0 is whoever calls, helpers come behind */

/* The units [first, end) of some work. A helper has a room of its own, which another work may have written to; who called has
   none here. */
typedef void (*Work)(void *of, int64_t first, int64_t end, int who, float *room);

/* What a helper, which has ended, left in its room; who called takes it before others write there. */
typedef void (*Gather)(void *of, int who, const float *room);

/* All n units, each once, in pieces of at most `most` and, but for the last, at least `least`; helpers' rooms have n_room
   floats. Helpers have ended when it returns; before that each one's room is gathered, if `gather` is not 0. Which pieces there
   are and who has which is different each time. */
void shared_out(int64_t n, int64_t least, int64_t most, int64_t n_room, Work work, Gather gather, void *of);

#endif
