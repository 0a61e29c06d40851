// Kernels that follow each other without a gap (programmatic dependent launch, from Hopper on).
//
// A kernel whose CudaKernel has waits=True is put in place while the one before it in the stream ends. So the first thing
// that each of its threads does is to wait until that one has ended and all that it wrote is seen.
#pragma once

__device__ __forceinline__ void wait_for_the_one_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Have the next one put in place now, which it otherwise is as blocks of this one end. For kernels of few blocks: blocks of
// the next one take what multiprocessors have left.
__device__ __forceinline__ void let_the_next_one_come() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
