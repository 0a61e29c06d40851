// What NVFP4's kernels are compiled for, each of which says what it means by it.
#pragma once

#ifdef LPQ_SQUARE
constexpr bool SQUARE = true;
#else
constexpr bool SQUARE = false;
#endif
#ifdef LPQ_ROTATED
constexpr bool ROTATED = true;
#else
constexpr bool ROTATED = false;
#endif
#ifdef LPQ_SHARED
constexpr bool SHARED = true;
#else
constexpr bool SHARED = false;
#endif
#ifdef LPQ_STATS
constexpr bool STATS = true;
#else
constexpr bool STATS = false;
#endif
