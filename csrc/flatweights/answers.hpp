// What a process does with the answers of several others in mailboxes: it sleeps until they are
// there, finds the models that they mention, and averages these.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "flatweights/doorbell.hpp"
#include "flatweights/layout.hpp"
#include "flatweights/mailbox.hpp"
#include "flatweights/memory_file.hpp"
#include "flatweights/message.hpp"

namespace flatweights {

// Seconds by CLOCK_MONOTONIC.
double seconds_now() noexcept;

// The bell that the others ring, and the descriptors at which a process sleeps.
struct Sleep {
  Doorbell* door;
  int bell;  // the eventfd that the doorbell rings
  int poll;  // an epoll of the bell, and of the others' sockets
};

// kBell: the bell has rung, or an answer came before it was armed, or the time is up. kSocket: one
// of the others has died, or has sent a packet.
enum class Woken { kBell, kSocket, kInterrupted };

// Sleeps until `awaited` of the answers in `missing` are there, or until `end`; or wakes early.
Woken sleep_at(const Sleep& sleep, std::span<const Mailbox* const> missing, std::uint32_t awaited,
               double end) noexcept;

// Posts to `box` without waking its other side, which holds this side's segments `held` from then
// on. A post is refused only if the other process has overwritten the word.
Mailbox::Posted post_with_holds(Mailbox& box, std::span<const std::byte> content,
                                std::uint32_t calls, std::span<const std::uint32_t> held) noexcept;

// A segment of another process, as its messages mention it.
struct KnownSegment {
  std::uint32_t index, generation;
  std::shared_ptr<MemoryFile> file;
};

// The memory of a buffer of `nbytes`; null if no segment has it, or the buffer has other bytes.
const std::byte* memory_of(const std::optional<Extent>& extent, std::size_t nbytes,
                           std::span<const KnownSegment> segments) noexcept;

// Writes the weighted mean of `models`, in their order, to `out`. Returns false if it is not to be
// used: no weight is positive or one is not finite, or the mean holds NaN or infinity, unless
// `takes_nonfinite`, or there is no such mean.
bool mean_of(const Layout& layout, std::span<const std::byte* const> models,
             const std::vector<double>& weights, bool takes_nonfinite, std::byte* out);

}  // namespace flatweights
