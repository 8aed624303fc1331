/* A vector as it is, where compilers would do otherwise. */
#ifndef AREAL_BUS_HELD_H
#define AREAL_BUS_HELD_H

/* In a register, and read from memory once; what is added to it is added in this order. */
#if defined(__AVX512F__)
#define HELD(vector) __asm__("" : "+v"(vector))
#elif defined(__x86_64__)
#define HELD(vector) __asm__("" : "+x"(vector))
#elif defined(__aarch64__)
#define HELD(vector) __asm__("" : "+w"(vector))
#else
#define HELD(vector)
#endif

#endif
