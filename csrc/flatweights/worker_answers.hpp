// A command to each of several workers, the wait for their answers, and the mean of these.
//
// A worker whose result is weights of a layout that the driver knows answers by a message of kind
// kWeights, with the digest of the layout and one buffer in a segment; one that has only set
// weights answers by a message of kind kValue, with a body that is always the same. If all do, and
// nothing else happens, the driver reads these messages here, and averages in place. Whatever is
// different is left where it is, for a driver that knows more: see `Ended`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "flatweights/answers.hpp"
#include "flatweights/layout.hpp"
#include "flatweights/mailbox.hpp"

namespace flatweights {

// Kinds of answers; channels/_protocol.py has all of them.
inline constexpr std::uint32_t kValue = 0;
inline constexpr std::uint32_t kWeights = 3;

class WorkerAnswers {
 public:
  // kAll: all have answered as expected, and their answers are read. For all others nothing is
  // read. kOther: an answer is something else, or the mean is not to be used. kSocket: a worker has
  // died, or has sent a packet. kLate: the time is up. kInterrupted: by a signal.
  enum class Ended { kAll, kOther, kSocket, kLate, kInterrupted };

  struct Patience {
    double watch;    // seconds of polling before the driver sleeps
    double seconds;  // of the wait in all
  };

  // The mailboxes of the workers, in the order of their ranks, and the layout of their weights.
  WorkerAnswers(std::vector<Mailbox*> boxes, Layout layout, std::string digest);

  // Tells the segments of a worker.
  void know(std::size_t worker, std::vector<KnownSegment> segments) {
    segments_[worker] = std::move(segments);
  }

  // A command for one worker. `held`: the driver's segments that it mentions, which the worker
  // holds from then on. `calls`: the number of Ray calls made so far.
  struct Command {
    std::span<const std::byte> content;
    std::vector<std::uint32_t> held;
    std::uint32_t calls;
  };

  // Posts a command to each worker, and wakes them. Returns the workers whose command needs another
  // call. Nothing is posted, and it returns nothing, unless all have answered the last command.
  std::optional<std::vector<std::size_t>> post(std::span<const Command> commands);
  // Waits for weights, and writes their weighted mean to `out`; one with NaN or infinity only if
  // `takes_nonfinite`.
  Ended mean(const std::vector<double>& weights, bool takes_nonfinite, const Patience& patience,
             const Sleep& sleep, std::byte* out);
  // Waits for values whose body is `value`, without buffers.
  Ended values(std::string_view value, const Patience& patience, const Sleep& sleep);

  // Whether no answer is left to be read of the commands that were posted, as far as is known here.
  [[nodiscard]] bool were_read() const noexcept { return are_read_; }
  // Notes that the answers which are left were read elsewhere.
  void note_read() noexcept { are_read_ = true; }
  // How often `post` has posted.
  [[nodiscard]] std::uint64_t posts() const noexcept { return posts_; }
  // Of the last call: seconds of the wait, and of the average.
  [[nodiscard]] double waited() const noexcept { return waited_; }
  [[nodiscard]] double averaged() const noexcept { return averaged_; }

 private:
  // What a worker answers.
  struct Expected {
    std::uint32_t kind;
    std::string_view body;
    bool has_model;
  };

  Ended wait(const Expected& expected, const Patience& patience, const Sleep& sleep);
  bool read(std::size_t worker, const Expected& expected);

  std::vector<Mailbox*> boxes_;
  Layout layout_;
  std::string digest_;
  std::vector<std::vector<KnownSegment>> segments_;
  // Of the last answers, by worker.
  std::vector<char> is_there_;
  std::vector<Extent> extents_;
  std::vector<const std::byte*> models_;
  bool are_read_ = true;
  std::uint64_t posts_ = 0;
  double waited_ = 0, averaged_ = 0;
};

}  // namespace flatweights
