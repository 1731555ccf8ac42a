// Calls of a process group's members that are the same as earlier ones, made by the coordinator
// from end to end.
//
// A member whose request is the same as one that was prepared sends the number of that one instead,
// in a message of kind kRepeat, with its weight, and its model in a segment. Once all have, the
// coordinator averages the models in the order of the ranks (or copies the root's) into one of two
// segments of its own, posts a message of kind kRepeated to all, and waits again. Whatever is not a
// repetition is left where it is, for a coordinator that knows more: see `Ended`.
//
// The same messages, mailboxes and segments as in other calls, so either side may go on in the
// other way at any time. One thread calls these functions.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "flatweights/answers.hpp"
#include "flatweights/layout.hpp"
#include "flatweights/mailbox.hpp"
#include "flatweights/message.hpp"
#include "flatweights/polling.hpp"

namespace flatweights {

// Kinds of messages; channels/_protocol.py has all of them.
inline constexpr std::uint32_t kRepeated = 3;  // a command
inline constexpr std::uint32_t kRepeat = 7;    // an answer

// The body of a message of kind kRepeat.
struct Repeat {
  std::uint64_t call;  // the number of a prepared call
  double weight;
};

// The body of a message of kind kRepeated.
struct Repeated {
  std::int64_t number;  // of the response
  double waited;        // seconds, for the last model
  double averaged;      // seconds
};

class RepeatedCalls {
 public:
  // A segment of the coordinator, of which the members know.
  struct Result {
    std::byte* memory;
    Extent extent;
  };

  // A call that members may repeat.
  struct Prepared {
    std::uint64_t call;
    Layout layout;
    std::optional<std::size_t> root;  // the position of the member whose model all get
    bool takes_nonfinite;             // whether NaN and infinity are averaged
    std::vector<double> timeouts;     // seconds, by member
    Result results[2];
    // What has come of it in this series.
    std::size_t last = 0;             // the position in `results` of the last result
    Repeated told{};                  // what its members were told
    std::int64_t count = 0;           // how often it was made
    double waited = 0, averaged = 0;  // seconds, in all
  };

  // Why a series has ended. kOther: with a message that is no repetition, or a repetition that
  // cannot be made here. kLate: the time of a call is up. kSocket: a member has died, or has sent a
  // segment. kPause: the seconds are over.
  enum class Ended { kOther, kQueue, kSocket, kLate, kPause };

  // The mailboxes of all members, in the order of their ranks.
  explicit RepeatedCalls(std::vector<Mailbox*> boxes);

  void prepare(Prepared call);
  void forget(std::uint64_t call);
  [[nodiscard]] std::span<const Prepared> prepared() const noexcept { return prepared_; }
  // Tells the segments of a member.
  void know(std::size_t member, std::vector<KnownSegment> segments) {
    segments_[member] = std::move(segments);
  }

  // Makes calls, with responses after `number`, for at most `seconds`, or until something else is
  // to be done; returns why. It posts nothing that it has not finished. `queued`: whether another
  // thread wants it to stop. `seen`: what `seen()` was at the end of the last series, without the
  // members whose messages were read since.
  Ended run(std::int64_t number, double seconds, const Sleep& sleep,
            const std::atomic<bool>& queued, std::vector<double> seen);

  // Of the last series: the number of calls, and the seconds waited for the one that was not made.
  [[nodiscard]] std::int64_t count() const noexcept { return count_; }
  [[nodiscard]] double pending() const noexcept { return pending_; }
  // By member, the time at which its message was seen, by CLOCK_MONOTONIC; 0, if it was not.
  [[nodiscard]] std::span<const double> seen() const noexcept { return seen_; }

 private:
  enum class Found { kMissing, kAll, kOther };

  Found look(double now);
  std::optional<Ended> wait(double begin, double end, const Sleep& sleep,
                            const std::atomic<bool>& queued);
  std::optional<Ended> sleep_until(double end, const Sleep& sleep);
  [[nodiscard]] Prepared* find(std::uint64_t call) noexcept;
  [[nodiscard]] double deadline() noexcept;
  [[nodiscard]] std::uint32_t awaited() const noexcept;
  bool make(std::int64_t number, double waited);
  bool average(Prepared& call, const Result& result);
  void post(const Prepared& call, const Result& result);

  std::vector<Mailbox*> boxes_;
  std::vector<std::vector<KnownSegment>> segments_;
  std::vector<Prepared> prepared_;
  // Of the messages of the next call, by member.
  std::vector<double> seen_, seen_before_;
  std::vector<Repeat> requests_;
  std::vector<std::optional<Extent>> extents_;
  std::vector<const std::byte*> models_;
  Polling polling_{150e-6};  // seconds, before the coordinator sleeps
  std::int64_t count_ = 0;
  double pending_ = 0;
};

}  // namespace flatweights
