// The averaging kernel of GPUs: one launch averages packed models, of any number of slots, in the
// GPU's own memory. device_average_ptx.hpp is what nvcc makes of it; CONTRIBUTING.md says how.
#include "flatweights/device_average_body.hpp"

// Each block averages one piece after the other.
extern "C" __global__ void __launch_bounds__(256)
    flatweights_average(const __grid_constant__ flatweights::DeviceAverage job) {
#pragma unroll 1
  for (std::uint32_t i = blockIdx.x; i < job.num_pieces; i += gridDim.x)
    flatweights::average_piece(job, job.pieces[i], threadIdx.x, blockDim.x);
}
