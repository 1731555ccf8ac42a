// Code that g++ compiles for processors and nvcc for GPUs, so that both give the same bits.
#pragma once

#if defined(__CUDACC__)
#define FLATWEIGHTS_DEVICE __device__
#define FLATWEIGHTS_UNROLL _Pragma("unroll")
#define FLATWEIGHTS_NO_UNROLL _Pragma("unroll 1")
#else
#define FLATWEIGHTS_DEVICE
#define FLATWEIGHTS_UNROLL
#define FLATWEIGHTS_NO_UNROLL
#endif
