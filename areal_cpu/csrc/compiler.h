/* Barriers that keep the compiler from changing how a vector is loaded or rounded. */
#ifndef AREAL_BUS_HELD_H
#define AREAL_BUS_HELD_H

/* In a register, and read from memory once. A sum that is held is of products that are not rounded before they are added: for
   some processors gcc rounds them where a loop has one sum alone, as that has to wait for each (-mtune, FMA chains). */
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
