#include "flatweights/answers.hpp"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <exception>

#include "flatweights/average.hpp"
#include "flatweights/relative_weights.hpp"

namespace flatweights {

double seconds_now() noexcept {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Woken sleep_at(const Sleep& sleep, std::span<const Mailbox* const> missing, std::uint32_t awaited,
               double end) noexcept {
  sleep.door->arm(awaited);
  // Perhaps before the bell was armed.
  if (std::ranges::any_of(missing, [](const Mailbox* box) { return box->is_answered(); }))
    return Woken::kBell;
  const double left = std::clamp(end - seconds_now(), 0.0, 3600.0);
  const int milliseconds = static_cast<int>(std::ceil(left * 1e3));
  std::array<epoll_event, 8> events{};
  const int count = epoll_wait(sleep.poll, events.data(), events.size(), milliseconds);
  if (count < 0) return errno == EINTR ? Woken::kInterrupted : Woken::kSocket;
  bool is_socket = false;
  for (int k = 0; k < count; ++k) {
    if (events[static_cast<std::size_t>(k)].data.fd != sleep.bell) {
      is_socket = true;
      continue;
    }
    std::uint64_t rings = 0;
    if (read(sleep.bell, &rings, sizeof rings) < 0) continue;  // another thread has heard it
  }
  return is_socket ? Woken::kSocket : Woken::kBell;
}

Mailbox::Posted post_with_holds(Mailbox& box, std::span<const std::byte> content,
                                std::uint32_t calls, std::span<const std::uint32_t> held) noexcept {
  for (const std::uint32_t segment : held) box.add_hold(Mailbox::Side::kWorker, segment);
  const Mailbox::Posted posted = box.post(content, calls, false);
  if (posted == Mailbox::Posted::kRefused)
    for (const std::uint32_t segment : held) box.drop_hold(Mailbox::Side::kWorker, segment);
  return posted;
}

const std::byte* memory_of(const std::optional<Extent>& extent, std::size_t nbytes,
                           std::span<const KnownSegment> segments) noexcept {
  if (!extent || extent->nbytes != nbytes) return nullptr;
  for (const KnownSegment& segment : segments) {
    if (segment.index != extent->segment || segment.generation != extent->generation) continue;
    const std::size_t size = segment.file->size();
    if (extent->offset > size || nbytes > size - extent->offset) return nullptr;
    return segment.file->data() + extent->offset;
  }
  return nullptr;
}

bool mean_of(const Layout& layout, std::span<const std::byte* const> models,
             const std::vector<double>& weights, bool takes_nonfinite, std::byte* out) {
  const auto is_weight = [](double weight) { return std::isfinite(weight) && weight >= 0; };
  if (!std::ranges::all_of(weights, is_weight)) return false;
  if (std::ranges::none_of(weights, [](double weight) { return weight > 0; })) return false;
  std::vector<AveragePart> parts;
  std::vector<const std::byte*> sources;
  for (const Slot& slot : layout.slots()) {
    parts.push_back({slot.dtype, slot.size, slot.nbytes, out + slot.offset, slot.dtype});
    for (const std::byte* const model : models) sources.push_back(model + slot.offset);
  }
  try {
    RelativeWeights relative;
    const std::vector<double> ratios = relative.add(weights);
    return average_into(parts, sources, ratios, relative.ratios) || takes_nonfinite;
  } catch (const std::exception&) {  // weights that are too far apart, or memory is short
    return false;
  }
}

}  // namespace flatweights
