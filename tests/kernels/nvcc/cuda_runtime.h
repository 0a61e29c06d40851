// What nvcc reads before every source, in place of CUDA's own: without the headers of the C++ standard library, which
// NVRTC does not read either and which take most of the time. What the sources, and the headers below, use of them is
// declared here.
#pragma once
#define __CUDA_INCLUDE_COMPILER_INTERNAL_HEADERS__
#include "builtin_types.h"
#include "crt/host_defines.h"
#include "vector_functions.h"
#include "device_launch_parameters.h"

extern "C" {
__device__ __device_builtin__ void* memcpy(void*, const void*, size_t);
__device__ __device_builtin__ float copysignf(float, float);
__device__ __device_builtin__ float expf(float);
__device__ __device_builtin__ float fabsf(float);
__device__ __device_builtin__ float fmaf(float, float, float);
__device__ __device_builtin__ float fmaxf(float, float);
__device__ __device_builtin__ float fminf(float, float);
__device__ __device_builtin__ float rsqrtf(float);
__device__ __device_builtin__ float tanhf(float);
}
template <typename T> __device__ T max(T a, T b) { return a < b ? b : a; }
template <typename T> __device__ T min(T a, T b) { return b < a ? b : a; }

#include "crt/device_functions.h"
