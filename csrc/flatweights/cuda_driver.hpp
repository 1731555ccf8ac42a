// NVIDIA's driver, as TensorFlow has loaded it into this process: nothing is linked.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <stdexcept>
#include <string>

namespace flatweights {

// A call of the driver failed.
struct CudaError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Throws CudaError in a fork of `process`: NVIDIA's driver does not work there, and a mutex copied
// into it may be locked for ever.
void refuse_fork(pid_t process);

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

// CUmemLocation: a GPU.
struct CudaLocation {
  int type = 1;  // CU_MEM_LOCATION_TYPE_DEVICE
  int device = 0;
};
static_assert(sizeof(CudaLocation) == 8);

// CUmemAllocationProp: memory of a GPU that can be exported as a file descriptor.
struct CudaAllocation {
  static constexpr int kDescriptor = 1;  // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

  int type = 1;  // CU_MEM_ALLOCATION_TYPE_PINNED, the only type of a GPU's own memory
  int handle_types = kDescriptor;
  CudaLocation location;
  void* only_for_segments = nullptr;
  unsigned char flags[8] = {};
};
static_assert(sizeof(CudaAllocation) == 32 && offsetof(CudaAllocation, location) == 8 &&
              offsetof(CudaAllocation, only_for_segments) == 16 &&
              offsetof(CudaAllocation, flags) == 24);

// CUmemAccessDesc.
struct CudaAccess {
  static constexpr int kRead = 1;   // CU_MEM_ACCESS_FLAGS_PROT_READ
  static constexpr int kWrite = 3;  // CU_MEM_ACCESS_FLAGS_PROT_READWRITE

  CudaLocation location;
  int flags = kRead;
};
static_assert(sizeof(CudaAccess) == 12 && offsetof(CudaAccess, flags) == 8);

// More functions of cuda.h, for memory of a GPU that processes share. Some drivers lack some of
// them: these are null, and the others work.
struct CudaSharing {
  using Address = unsigned long long;
  using Handle = unsigned long long;

  // Throws CudaError if there is no driver.
  static const CudaSharing& instance();

  std::string missing;  // the name of a function that the driver lacks; empty if it lacks none

  int (*device_uuid)(void* uuid, int device);
  int (*device_attribute)(int* value, int attribute, int device);
  int (*current_device)(int* device);
  int (*granularity)(std::size_t* nbytes, const CudaAllocation* allocation, int option);
  int (*create)(Handle* handle, std::size_t nbytes, const CudaAllocation* allocation,
                unsigned long long flags);
  int (*export_handle)(void* shareable, Handle handle, int type, unsigned long long flags);
  int (*import_handle)(Handle* handle, void* shareable, int type);
  int (*release)(Handle handle);
  int (*reserve)(Address* address, std::size_t nbytes, std::size_t alignment, Address wanted,
                 unsigned long long flags);
  int (*free_reserved)(Address address, std::size_t nbytes);
  int (*map)(Address address, std::size_t nbytes, std::size_t offset, Handle handle,
             unsigned long long flags);
  int (*unmap)(Address address, std::size_t nbytes);
  int (*set_access)(Address address, std::size_t nbytes, const CudaAccess* access,
                    std::size_t count);
  int (*copy_to_host)(void* to, Address from, std::size_t nbytes);
  int (*copy_to_device)(Address to, const void* from, std::size_t nbytes);
};

// The context of a stream. Throws CudaError.
[[nodiscard]] void* context_of_stream(void* stream);

// Makes a context the thread's, from here to the end of the scope.
class CurrentContext {
 public:
  // Throws CudaError.
  explicit CurrentContext(void* context);
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;
  ~CurrentContext();
};

}  // namespace flatweights
