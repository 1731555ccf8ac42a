#include "flatweights/average_segments.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>

#include "flatweights/cuda_driver.hpp"
#include "flatweights/device_average.hpp"
#include "flatweights/device_average_ptx.hpp"
#include "flatweights/dtype.hpp"
#include "flatweights/scalar.hpp"

namespace flatweights {
namespace {

constexpr std::size_t kPieceBytes = std::size_t{16} << 10;  // for one block of threads
constexpr unsigned kThreads = 256;                          // of a block, as the kernel expects

// What a GPU needs for averages, in its context. It lives as long as the process.
class Averager {
 public:
  explicit Averager(const CudaDriver& driver) : driver_(driver) {
    constexpr unsigned kNonBlocking = 1;    // CU_STREAM_NON_BLOCKING
    constexpr unsigned kWithoutTiming = 2;  // CU_EVENT_DISABLE_TIMING
    void* module = nullptr;
    driver_.check(driver_.load_module(&module, kDeviceAveragePtx), "cuModuleLoadData");
    driver_.check(driver_.function_of_module(&function_, module, "flatweights_average"),
                  "cuModuleGetFunction");
    driver_.check(driver_.create_stream(&stream_, kNonBlocking), "cuStreamCreate");
    driver_.check(driver_.create_event(&event_, kWithoutTiming), "cuEventCreate");
    void* flags = nullptr;
    driver_.check(driver_.allocate_on_host(&flags, kMostAveraged * sizeof *flags_, 0),
                  "cuMemHostAlloc");
    flags_ = static_cast<std::uint32_t*>(flags);
  }

  void run(DeviceAverage& job, std::span<const AveragePiece> pieces) {
    std::fill_n(flags_, kMostAveraged, 0);
    if (pieces.empty()) return;
    reserve(pieces.size());
    std::ranges::copy(pieces, pieces_);
    job.pieces = pieces_;
    job.nonfinite = flags_;
    job.num_pieces = static_cast<std::uint32_t>(pieces.size());
    void* arguments[] = {&job};
    driver_.check(driver_.launch(function_, job.num_pieces, 1, 1, kThreads, 1, 1, 0, stream_,
                                 arguments, nullptr),
                  "cuLaunchKernel");
    const int recorded = driver_.record_event(event_, stream_);
    if (recorded != 0) driver_.synchronize_context();  // segments may be gone after the error
    driver_.check(recorded, "cuEventRecord");
    driver_.check(driver_.synchronize_event(event_), "cuEventSynchronize");
  }

  [[nodiscard]] bool is_flagged(std::size_t source) const noexcept { return flags_[source] != 0; }

 private:
  // The table is in the host's memory, where a larger one takes the place of a smaller one.
  void reserve(std::size_t count) {
    if (count <= room_) return;
    void* pieces = nullptr;
    driver_.check(driver_.allocate_on_host(&pieces, 2 * count * sizeof *pieces_, 0),
                  "cuMemHostAlloc");
    pieces_ = static_cast<AveragePiece*>(pieces);
    room_ = 2 * count;
  }

  const CudaDriver& driver_;
  void* function_ = nullptr;
  void* stream_ = nullptr;
  void* event_ = nullptr;
  AveragePiece* pieces_ = nullptr;
  std::size_t room_ = 0;
  std::uint32_t* flags_ = nullptr;
};

// By context. One average at a time: each uses a GPU whole.
struct Averagers {
  std::mutex mutex;
  std::map<void*, Averager> by_context;
  const pid_t process = getpid();

  static Averagers& instance() {
    static auto* const averagers = new Averagers;
    return *averagers;
  }
};

std::vector<AveragePiece> pieces_of(const Layout& layout) {
  std::vector<AveragePiece> pieces;
  for (const Slot& slot : layout.slots()) {
    const bool is_kept = !is_averaged(slot.dtype);
    const std::size_t count = is_kept ? slot.nbytes : slot.size * reals_per_element(slot.dtype);
    if (count == 0) continue;
    const std::size_t size = slot.nbytes / count;
    const std::size_t most = kPieceBytes / size;
    for (std::size_t done = 0; done < count; done += most)
      pieces.push_back({slot.offset + done * size,
                        static_cast<std::uint32_t>(std::min(most, count - done)),
                        is_kept ? kKept : static_cast<std::uint32_t>(real_of(slot.dtype))});
  }
  return pieces;
}

}  // namespace

std::size_t most_averaged_segments() noexcept { return kMostAveraged; }

std::vector<bool> average_segments(void* context, const Layout& layout, std::byte* out,
                                   std::span<const std::byte* const> sources,
                                   std::span<const double> weights, double total) {
  const std::vector<AveragePiece> pieces = pieces_of(layout);
  const Divisor divisor(total);
  DeviceAverage job{};
  job.out = out;
  job.factor = divisor.factor;
  job.multiply = divisor.multiply ? 1 : 0;
  job.weighted = std::ranges::any_of(weights, [](double w) { return w != 1; }) ? 1 : 0;
  job.num_sources = static_cast<std::uint32_t>(sources.size());
  std::ranges::copy(sources, job.sources);
  std::ranges::copy(weights, job.weights);
  Averagers& averagers = Averagers::instance();
  refuse_fork(averagers.process);
  const std::lock_guard turn(averagers.mutex);
  const CurrentContext current(context);
  Averager& averager =
      averagers.by_context.try_emplace(context, CudaDriver::instance()).first->second;
  averager.run(job, pieces);
  std::vector<bool> flagged;
  for (std::size_t k = 0; k < sources.size(); ++k) flagged.push_back(averager.is_flagged(k));
  return flagged;
}

}  // namespace flatweights
