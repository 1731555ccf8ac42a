// NVIDIA's driver, as TensorFlow has loaded it into this process: nothing is linked.
#pragma once

#include <cstddef>
#include <stdexcept>

namespace flatweights {

// A call of the driver failed.
struct CudaError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The functions of cuda.h that are used; its handles are pointers, its devices and results are int.
struct CudaDriver {
  // Throws CudaError if there is no driver.
  static const CudaDriver& instance();

  static bool is_found();

  // Throws std::bad_alloc or CudaError if the function `name` returned a failure.
  void check(int result, const char* name) const;

  int (*error_name)(int result, const char** name);
  int (*count_devices)(int* count);
  int (*device_at)(int* device, int ordinal);
  int (*primary_context_state)(int device, unsigned* flags, int* is_active);
  int (*retain_primary_context)(void** context, int device);
  int (*context_of_stream)(void* stream, void** context);
  int (*push_context)(void* context);
  int (*pop_context)(void** context);
  int (*synchronize_context)();
  int (*pointer_attribute)(void* value, int attribute, unsigned long long pointer);
  int (*create_stream)(void** stream, unsigned flags);
  int (*allocate_on_host)(void** memory, std::size_t nbytes, unsigned flags);
  int (*load_module)(void** module, const void* image);
  int (*function_of_module)(void** function, void* module, const char* name);
  int (*launch)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream,
                void** arguments, void** extra);
  int (*create_event)(void** event, unsigned flags);
  int (*record_event)(void* event, void* stream);
  int (*synchronize_event)(void* event);

  // Null in a driver that lacks them; everything else works without them.
  int (*current_context)(void** context);
  int (*pin)(void* memory, std::size_t nbytes, unsigned flags);
  int (*unpin)(void* memory);
  int (*pinned_address)(unsigned long long* address, void* memory, unsigned flags);
};

}  // namespace flatweights
